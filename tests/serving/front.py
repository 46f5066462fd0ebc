"""A gateway without Ray, and how its tests ask it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from starlette.responses import JSONResponse, Response

from dpray.serving.coordinator import Shared
from dpray.serving.gateway import Caller, Endpoint, Gateway
from dpray.serving.ray_errors import api_error
from dpray.serving.settings import ServeConfig

KEY, OTHER, WORD = "key-one", "key-two", "Marlowe"
CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
MODEL = "minilm"
CARDS = [{"id": MODEL, "object": "model", "created": 1, "owned_by": "dpray"}]


def hashed(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


async def echo(body: dict[str, Any], caller: Caller) -> Response:
    return JSONResponse({"keys": sorted(body), "salt": caller.salt})


async def always_ready() -> Mapping[str, bool]:
    return {"gateway": True}


def config(**changes: Any) -> ServeConfig:
    return ServeConfig.model_validate({"keys": [hashed(OTHER), hashed(KEY)]} | changes)


def gateway(
    answer: Endpoint = echo,
    ready: Callable[[], Awaitable[Mapping[str, bool]]] = always_ready,
    coordinator: Shared | None = None,
    **changes: Any,
) -> Gateway:
    endpoints = {CHAT: answer, EMBEDDINGS: answer}
    return Gateway(config(**changes), endpoints, CARDS, ready, api_error, coordinator)


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


def samples(page: str, name: str, **labels: str) -> list[Sample]:
    """The samples of a metrics page with this name and these labels."""
    return [
        sample
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]


def requests(page: str, route: str, status: int) -> float:
    """The number of requests on a metrics page, of all gateways."""
    found = samples(page, "dpray_requests_total", route=route, status=str(status))
    return sum(sample.value for sample in found)


def in_flight(page: str) -> float:
    return sum(sample.value for sample in samples(page, "dpray_requests_in_flight"))


def counted(app: Gateway, route: str, status: int) -> float:
    return requests(ask(app, "/metrics").text, route, status)


def assert_openais(answer: httpx.Response, status: int, code: str) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert WORD not in answer.text
