"""The guard around an application without Ray, and how its tests ask it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from dpray.serving.errors import reraise
from dpray.serving.guard import Endpoint, Guard
from dpray.serving.requests import ChatCall, CompletionCall, EmbeddingCall, Room
from dpray.serving.settings import ServeConfig

KEY, OTHER, WORD = "key-one", "key-two", "Marlowe"
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
MODEL = "minilm"
ROOM = Room(size=1000, part=50, smallest=100)
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": WORD}], "max_tokens": 9},
    COMPLETIONS: {"model": MODEL, "prompt": WORD},
    EMBEDDINGS: {"model": MODEL, "input": WORD},
}
Answer = Callable[[Request], Awaitable[Response]]


def hashed(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


async def echo(request: Request) -> Response:
    """Answer with the request that arrived behind the guard."""
    body = await request.json() if request.method == "POST" else None
    return JSONResponse({"body": body, "headers": sorted(request.headers)})


def config(**changes: Any) -> ServeConfig:
    return ServeConfig.model_validate({"keys": [hashed(OTHER), hashed(KEY)]} | changes)


async def one_replica(deployment: str) -> int:
    return 1


def guard(answer: Answer = echo, **changes: Any) -> ASGIApp:
    """An application behind the guard, as `dpray.serving.applications` makes it."""
    kinds = {CHAT: ChatCall, COMPLETIONS: CompletionCall, EMBEDDINGS: EmbeddingCall}
    endpoints = {path: Endpoint(kind, MODEL, "llm", ROOM) for path, kind in kinds.items()}
    routes = [Route(path, answer, methods=["POST"]) for path in kinds]
    routes.append(Route("/v1/models", answer))

    app = Starlette(routes=routes, exception_handlers={HTTPException: reraise})
    app.add_middleware(Guard, config(**changes), endpoints, one_replica)
    return app


def http(
    app: ASGIApp, key: str | None = KEY, client: tuple[str, int] = ("127.0.0.1", 1)
) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app, client=client), base_url="http://test", headers=headers
    )


def ask(app: ASGIApp, path: str = CHAT, key: str | None = KEY, **more: Any) -> httpx.Response:
    """One POST, or a GET if there is nothing to send."""

    async def send() -> httpx.Response:
        async with http(app, key, more.pop("client", ("127.0.0.1", 1))) as client:
            return await client.request("POST" if more else "GET", path, **more)

    return asyncio.run(send())


def assert_openais(answer: httpx.Response, status: int, code: str) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert WORD not in answer.text
