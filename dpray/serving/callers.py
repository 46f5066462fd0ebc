"""Every caller has a key, a number of requests in flight and a share of each model.

A share is what keeps callers from starving each other. With two keys or more, a caller's requests
take at most half of a model's room and wait for each other beyond it, so that the next caller finds
room at once beside one that is busy. With k busy callers a request waits for at most k / 2 rounds
of the model. Each gateway gives away its part of the room and of every limit, so that the parts of
all gateways add up to no more than the whole.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import SlidingWindowCounterRateLimiter
from starlette.requests import Request

from dpray.serving.errors import ApiError
from dpray.serving.requests import Room
from dpray.serving.settings import ServeConfig

_ANYBODY = "anybody"
"""Every caller has this name if no key is needed."""


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

    def __init__(self, name: str, most_in_flight: int) -> None:
        self.name = name
        self.reading = asyncio.Lock()
        """It lets the bodies of one caller be parsed one at a time, those of others in between."""
        self.shares: defaultdict[str, Share] = defaultdict(Share)
        self._in_flight, self._most = 0, most_in_flight

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request for as long as it is in flight. Raises ApiError 429 for one too many."""
        if self._in_flight >= self._most:
            raise _too_many("too many requests of this key in flight")
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1


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
            if not _is_loopback(request):
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

    def check_rate(self, caller: Caller) -> None:
        """Raise ApiError 429 for a caller that has sent too many requests in the last minute."""
        if self._rate is not None and not self._limiter.hit(self._rate, caller.name):
            raise _too_many("too many requests of this key in a minute")

    def share(self, room: Room, replicas: int = 1) -> int:
        """Return a caller's part, in this gateway, of a model's running replicas; at least the room
        of one sequence."""
        return max(room.smallest, room.size * replicas // self._gateways // self._parts)


def _too_many(message: str) -> ApiError:
    return ApiError(429, message, "rate_limit_exceeded", headers={"Retry-After": "1"})


def _is_loopback(request: Request) -> bool:
    try:
        return request.client is not None and ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False
