"""The real gateway under uvicorn, as Serve runs it, with endpoints that need no model.

`python -m tests.cluster.upstream PORT [HASH]`; without a key's hash all of this machine may call.
Each answer has the names of the headers that arrived in `x-arrived`, and the caller's address and
request id beside it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from dpray.serving.gateway import Caller, Gateway
from dpray.serving.settings import ServeConfig
from tests.serving.front import CHAT, always_ready

PAUSE = 1.0
"""Seconds between the events of a stream, and of an answer to {"wait": n}, n times."""


async def answer(body: dict[str, Any], caller: Caller) -> Response:
    if body.get("stream"):
        return StreamingResponse(events(), media_type="text/event-stream")
    await asyncio.sleep(PAUSE * body.get("wait", 0))
    return JSONResponse({"bytes": len(json.dumps(body))})


async def events() -> AsyncIterator[str]:
    for number in range(4):
        yield f"data: {number}\n\n"
        await asyncio.sleep(PAUSE)


class Telling:
    """The gateway, whose answers tell what arrived."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = Headers(scope=scope)

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-arrived"] = ",".join(sorted(arrived))
                headers["x-arrived-id"] = arrived.get("x-request-id", "")
                headers["x-arrived-for"] = arrived.get("x-forwarded-for", "")
                headers["x-request-id"] = "upstream"
            await send(message)

        await self._gateway(scope, receive, tell)


def main(port: str, *keys: str) -> None:
    many = {"max_in_flight": 5000, "max_in_flight_per_key": 5000}
    config = ServeConfig.model_validate(
        {"keys": list(keys), "auth": "keys" if keys else "none", "limits": many}
    )
    gateway = Gateway(config, {CHAT: answer}, [], always_ready)
    uvicorn.run(
        Telling(gateway), port=int(port), access_log=False, lifespan="off", log_level="critical"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
