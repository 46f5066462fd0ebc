"""The real guard under uvicorn, as Serve runs it, before an endpoint that needs no model.

`python -m tests.cluster.upstream PORT HASH`, with the hash of the only key. Each answer has the
names of the headers that arrived in `x-arrived`, and the caller's address and request id beside it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dpray.serving.errors import reraise
from dpray.serving.guard import Endpoint, Guard
from dpray.serving.requests import Room
from dpray.serving.settings import ServeConfig
from tests.serving.front import CHAT, one_replica

PAUSE = 1.0
"""Seconds between the events of a stream, and of an answer to {"wait": n}, n times."""


class AnyCall(BaseModel):
    """A request that no model answers, and that costs nothing."""

    model: None = None
    a: Any = None
    wait: int = 0
    stream: bool = False

    def cost(self, room: Room) -> int:
        return 0


async def answer(request: Request) -> Response:
    body = await request.json()
    if body["stream"]:
        return StreamingResponse(events(), media_type="text/event-stream")
    await asyncio.sleep(PAUSE * body["wait"])
    return JSONResponse({})


async def models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": []})


async def events() -> AsyncIterator[str]:
    for number in range(4):
        yield f"data: {number}\n\n"
        await asyncio.sleep(PAUSE)


class Telling:
    """The guarded application, whose answers tell what arrived, beside Serve's page of health."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/-/healthz":
            await PlainTextResponse("success")(scope, receive, send)
            return
        arrived = Headers(scope=scope)

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-arrived"] = ",".join(sorted(arrived))
                headers["x-arrived-id"] = arrived.get("x-request-id", "")
                headers["x-arrived-for"] = arrived.get("x-forwarded-for", "")
                headers["x-request-id"] = "upstream"
            await send(message)

        await self._app(scope, receive, tell)


def main(port: str, key: str) -> None:
    config = ServeConfig.model_validate(
        {
            "keys": [key],
            "limits": {"max_in_flight_per_key": 5000, "body_timeout_seconds": 5},
        }
    )
    endpoint: Any = Endpoint(AnyCall, None, "llm", Room(1, 1, 1))  # type: ignore[arg-type]
    routes = [Route(CHAT, answer, methods=["POST"]), Route("/v1/models", models)]
    app = Starlette(routes=routes, exception_handlers={HTTPException: reraise})
    app.add_middleware(Guard, config, {CHAT: endpoint}, one_replica)
    uvicorn.run(
        Telling(app), port=int(port), access_log=False, lifespan="off", log_level="critical"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
