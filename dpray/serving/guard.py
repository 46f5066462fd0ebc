"""The guard stands before Ray's OpenAI application: keys, bounds, allowed keys and fair shares.

It is an ASGI middleware around any application, so that tests run it without a cluster. What passes
it is a checked request, without the caller's headers; what comes back as an exception becomes an
error in OpenAI's format.

Every caller has a key, a number of requests in flight and a share of each model. A share keeps
callers from starving each other. With two keys or more, a caller's requests take at most half of a
model's room and wait for each other beyond it, so that the next caller finds room at once next to a
busy one. With k busy callers a request waits for at most k / 2 rounds of the model. Each gateway
gives away its part of the room and of every limit, so that the parts of all gateways add up to no
more than the whole.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import SlidingWindowCounterRateLimiter
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dpray.serving.errors import ApiError, api_error
from dpray.serving.requests import Call, Generation, Room, checked, checked_cost, read_body
from dpray.serving.settings import ServeConfig

_ANYBODY = "anybody"
"""Every caller has this name if no key is needed."""
RETRY_SECONDS = 1.0
"""Seconds that a client with too many requests has to wait before the next one."""


class Share:
    """A caller's part of one model, taken by its requests in their order."""

    def __init__(self) -> None:
        self._taken = 0
        self._turn = asyncio.Lock()
        self._returned = asyncio.Event()

    @asynccontextmanager
    async def take(self, cost: int, limit: int) -> AsyncIterator[None]:
        """Wait until the caller's requests cost at most `limit` together; `cost` is not greater."""
        async with self._turn:
            while self._taken + cost > limit:
                self._returned.clear()
                await self._returned.wait()
            self._taken += cost
        try:
            yield
        finally:
            self._taken -= cost
            self._returned.set()


class Caller:
    """A caller's requests in this gateway. Its `name` says nothing about its key."""

    def __init__(
        self, name: str, most_in_flight: int, retry_seconds: float = RETRY_SECONDS
    ) -> None:
        self.name = name
        self._retry_seconds = retry_seconds
        self.reading = asyncio.Lock()
        """It lets the bodies of one caller be parsed one at a time, those of others in between."""
        self.shares: defaultdict[str, Share] = defaultdict(Share)
        self._in_flight = self._waiting = 0
        self._most = most_in_flight

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[None]:
        """Count a request for as long as it is in flight. Raises ApiError 429 for one too many."""
        if self._in_flight >= self._most:
            await self.wait_for_refusal()
            raise _too_many("too many requests of this key in flight")
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    async def wait_for_refusal(self) -> None:
        """Delay a refusal, so that a client that retries at once is slowed down. Refusals beyond
        the number of requests that may be in flight are not delayed."""
        if self._waiting >= self._most:
            return
        self._waiting += 1
        try:
            await asyncio.sleep(self._retry_seconds)
        finally:
            self._waiting -= 1


class Callers:
    """Recognizes callers by the hashes of their keys, and holds their limits in this gateway."""

    def __init__(self, config: ServeConfig) -> None:
        self._gateways, limits = config.gateways, config.limits
        self._digests = [bytes.fromhex(each.removeprefix("sha256:")) for each in config.keys]
        names = list(map(str, range(len(self._digests)))) or [_ANYBODY]
        most = max(1, limits.max_in_flight_per_key // self._gateways)
        self._callers = {name: Caller(name, most) for name in names}
        self._parts = 1 if len(names) == 1 else 2
        self._rate = None
        if limits.requests_per_minute_per_key is not None:
            rate = limits.requests_per_minute_per_key // self._gateways
            self._rate = RateLimitItemPerMinute(max(1, rate))
        self._limiter = SlidingWindowCounterRateLimiter(MemoryStorage())

    def recognize(self, request: Request) -> Caller:
        """Return the caller of a request. Raises ApiError 401 or 403.

        Its time says nothing about the keys: a hash is compared, in constant time, with that of
        every key.
        """
        if not self._digests:
            # Serve binds its port by its own settings, which a file for `serve deploy` does not
            # change if Serve runs already: check the caller's address too.
            # And the name that it calls: the one of a page that a browser here has open may lead to
            # this machine by now, and what the page sends then is no request to another site.
            here = request.client is not None and _is_loopback_address(request.client.host)
            if not (here and _is_local_name(request)):
                raise ApiError(403, "only callers on this machine are served", "not_local")
            return self._callers[_ANYBODY]
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(token.strip().encode("latin-1", "replace")).digest()
        found = [hmac.compare_digest(digest, each) for each in self._digests]
        if scheme.lower() != "bearer" or True not in found:
            message = "a valid API key is needed: Authorization: Bearer KEY"
            bearer = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, message, "invalid_api_key", headers=bearer)
        return self._callers[str(found.index(True))]

    async def check_rate(self, caller: Caller) -> None:
        """Raise ApiError 429 for a caller that has sent too many requests in the last minute."""
        if self._rate is not None and not self._limiter.hit(self._rate, caller.name):
            await caller.wait_for_refusal()
            raise _too_many("too many requests of this key in a minute")

    def share(self, room: Room, replicas: int = 1) -> int:
        """Return a caller's part, in this gateway, of a model's running replicas; at least the room
        of one sequence."""
        return max(room.smallest, room.size * replicas // self._gateways // self._parts)


def _too_many(message: str) -> ApiError:
    return ApiError(
        429, message, "rate_limit_exceeded", headers={"Retry-After": f"{RETRY_SECONDS:.0f}"}
    )


def _is_local_name(request: Request) -> bool:
    """Return whether the request is for `localhost` or a loopback address, by its Host."""
    try:
        name = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    except ValueError:
        return False
    return name == "localhost" or _is_loopback_address(name)


def _is_loopback_address(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


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
        await self._callers.check_rate(caller)
        if request.method != "POST":
            await self._app(_without_headers(request.scope), request.receive, send)
            return
        # Not the path of `request.url`, which is made of the caller's Host too. An unknown path is
        # refused here: the application may know it by another name, as below a prefix.
        if (endpoint := self._endpoints.get(request.scope["path"])) is None:
            raise ApiError(404, "no such path here", "not_found")
        async with caller.counted():
            call = await self._call(request, caller, endpoint)
            most = self._callers.share(endpoint.room)
            cost = checked_cost(call, endpoint.room, most)
            replicas = await self._replicas(endpoint.deployment)
            share = self._callers.share(endpoint.room, replicas)
            async with caller.shares[endpoint.deployment].take(cost, share):
                receive = _replayed(_body(call, caller), request.receive)
                await self._app(_without_headers(request.scope), receive, send)

    async def _call(self, request: Request, caller: Caller, endpoint: Endpoint) -> Call:
        most, seconds = self._limits.max_request_bytes, self._limits.body_timeout_seconds
        body = await read_body(request, most, seconds)
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
    a caller whether another one had sent some prompt; an embedder that is made of a causal model
    has such a cache, too. An embedder cuts a text that is too long.
    """
    body = call.model_dump(exclude_none=True) | {"cache_salt": caller.name}
    if not isinstance(call, Generation):
        body["truncate_prompt_tokens"] = -1
    return json.dumps(body).encode()


def _without_headers(scope: Scope) -> dict[str, object]:
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
