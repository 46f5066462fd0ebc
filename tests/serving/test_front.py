"""Ray Serve's own proxy answers for gateways that died, without Ray."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from dpray.serving.errors import front_middlewares
from tests.serving.front import CHAT, WORD, assert_openais


def answered(response: Response | None, path: str = CHAT) -> httpx.Response:
    """The answer to a request that Serve's proxy answers so; None: it sends nothing."""

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        if response is not None:
            await response(scope, receive, send)

    app: ASGIApp = proxy
    for middleware in front_middlewares():
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, json={})

    return asyncio.run(ask())


@pytest.mark.parametrize(
    "failure",
    [None, PlainTextResponse(WORD, 500), PlainTextResponse(WORD, 503)],
    ids=["nothing", "500", "503"],
)
def test_what_no_gateway_has_answered_may_be_sent_again(failure: Response | None) -> None:
    answer = answered(failure)
    assert_openais(answer, 503, "overloaded")
    assert answer.headers["Retry-After"] == "1"


def test_a_gateways_own_answers_pass() -> None:
    async def events() -> Any:
        for number in range(3):
            yield f"data: {number}\n\n"

    stream = StreamingResponse(events(), media_type="text/event-stream")
    assert answered(stream).text == "data: 0\n\ndata: 1\n\ndata: 2\n\n"
    for status in (200, 400, 429, 500, 503, 504):
        own = answered(JSONResponse({"mine": status}, status, {"Retry-After": "7"}))
        assert (own.status_code, own.json()) == (status, {"mine": status})
        assert own.headers["Retry-After"] == "7"


def test_serves_own_pages_pass() -> None:
    assert answered(PlainTextResponse("unhealthy", 503), "/-/healthz").text == "unhealthy"
    assert answered(PlainTextResponse("no", 404)).status_code == 404
