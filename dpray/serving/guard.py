"""The guard stands before Ray's OpenAI application: keys, bounds, allowed keys and fair shares.

It is an ASGI middleware around any application, so that tests run it without a cluster. What passes
it is a checked request, without the caller's headers; what comes back as an exception becomes an
error in OpenAI's format.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dpray.serving.callers import Caller, Callers
from dpray.serving.errors import ApiError, api_error
from dpray.serving.requests import (
    Call,
    Generation,
    Room,
    checked,
    checked_cost,
    read_body,
)
from dpray.serving.settings import ServeConfig

Replicas = Callable[[str], Awaitable[int]]
"""It returns how many replicas of a deployment run, at least 1."""


class Endpoint(NamedTuple):
    """The keys of a POST endpoint and the model that answers it."""

    keys: type[Call]
    model: str
    deployment: str
    room: Room


class Guard:
    """Passes checked requests on to `app`; `endpoints` are its POST endpoints, by path."""

    def __init__(
        self,
        app: ASGIApp,
        config: ServeConfig,
        endpoints: Mapping[str, Endpoint],
        replicas: Replicas,
    ) -> None:
        self._app, self._limits, self._endpoints = app, config.limits, endpoints
        self._callers, self._replicas = Callers(config), replicas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        try:
            async with asyncio.timeout(self._limits.request_timeout_seconds):
                await self._guarded(Request(scope, receive), answer)
        except ClientDisconnect:
            pass
        except Exception as error:
            await answer.fail(api_error(error), scope, receive)

    async def _guarded(self, request: Request, send: Send) -> None:
        caller = self._callers.recognize(request)
        endpoint = self._endpoints.get(request.url.path)
        if request.method != "POST" or endpoint is None:
            await self._app(_without_headers(request.scope), request.receive, send)
            return
        self._callers.check_rate(caller)
        with caller.counted():
            call = await self._call(request, caller, endpoint)
            most = self._callers.share(endpoint.room)
            cost = checked_cost(call, endpoint.room, most)
            replicas = await self._replicas(endpoint.deployment)
            share = self._callers.share(endpoint.room, replicas)
            async with caller.shares[endpoint.deployment].take(cost, share):
                receive = _replayed(_body(call, caller), request.receive)
                await self._app(_without_headers(request.scope), receive, send)

    async def _call(self, request: Request, caller: Caller, endpoint: Endpoint) -> Call:
        body = await read_body(request, self._limits.max_request_bytes)
        async with caller.reading:
            await asyncio.sleep(0)
            call = checked(endpoint.keys, body, self._limits.max_request_entries)
        if call.model != endpoint.model:
            message = f"no such model here; there is {endpoint.model}"
            raise ApiError(404, message, "model_not_found", "model")
        return call


def _body(call: Call, caller: Caller) -> bytes:
    """Return the body for the application.

    Each caller has its own part of vLLM's prefix cache, or the time of an answer would tell
    a caller whether another one had sent some prompt. An embedder cuts a text that is too long.
    """
    body = call.model_dump(exclude_none=True)
    body |= (
        {"cache_salt": caller.name}
        if isinstance(call, Generation)
        else {"truncate_prompt_tokens": -1}
    )
    return json.dumps(body).encode()


def _without_headers(scope: Scope) -> dict[str, Any]:
    """Return a scope without the caller's headers: Ray sends all of them, with the key, to the
    model's replica."""
    return dict(scope, headers=[(b"content-type", b"application/json")])


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Make a `receive` that gives `body`, and then what else arrives."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay


class _Answer:
    """Sends as ASGI's `send`, and keeps track of how much of the answer was sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_begun = self._streams_events = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._has_begun = True
            headers = {name.lower(): value for name, value in message.get("headers", [])}
            kind = headers.get(b"content-type", b"")
            self._streams_events = kind.startswith(b"text/event-stream")
        await self._send(message)

    async def fail(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        """Send the error as the answer, or as the last event of a stream that has begun."""
        if not self._has_begun:
            await error.response(scope, receive, self._send)
            return
        last = error.event if self._streams_events else b""
        await self._send({"type": "http.response.body", "body": last, "more_body": False})
