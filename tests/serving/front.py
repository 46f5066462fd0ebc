"""A gateway without Ray, and how its tests ask it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx
from starlette.responses import JSONResponse, Response

from dpray.serving.gateway import Endpoint, Gateway
from dpray.serving.ray_errors import api_error
from dpray.serving.settings import ServeConfig

KEY, OTHER, WORD = "key-one", "key-two", "Marlowe"
CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
MODEL = "minilm"
CARDS = [{"id": MODEL, "object": "model", "created": 1, "owned_by": "dpray"}]


def hashed(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


async def echo(body: dict[str, Any], salt: str) -> Response:
    return JSONResponse({"keys": sorted(body), "salt": salt})


async def always_ready() -> Mapping[str, bool]:
    return {"gateway": True}


def config(**changes: Any) -> ServeConfig:
    return ServeConfig.model_validate({"keys": [hashed(OTHER), hashed(KEY)]} | changes)


def gateway(
    answer: Endpoint = echo,
    ready: Callable[[], Awaitable[Mapping[str, bool]]] = always_ready,
    **changes: Any,
) -> Gateway:
    return Gateway(config(**changes), {CHAT: answer, EMBEDDINGS: answer}, CARDS, ready, api_error)


def http(
    app: Gateway, key: str | None = KEY, client: tuple[str, int] = ("127.0.0.1", 1)
) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app, client=client), base_url="http://test", headers=headers
    )


def ask(app: Gateway, path: str = CHAT, key: str | None = KEY, **more: Any) -> httpx.Response:
    """One POST, or a GET where there is nothing to send."""

    async def send() -> httpx.Response:
        async with http(app, key, more.pop("client", ("127.0.0.1", 1))) as client:
            return await client.request("POST" if more else "GET", path, **more)

    return asyncio.run(send())


def counted(app: Gateway, route: str, status: int) -> float:
    line = f'dpray_requests_total{{route="{route}",status="{status}"}} '
    page = ask(app, "/metrics").text
    return sum(float(each.removeprefix(line)) for each in page.splitlines() if line in each)


def assert_openais(answer: httpx.Response, status: int, code: str) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert WORD not in answer.text
