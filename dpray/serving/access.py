"""Every caller has an API key, a limit on requests in flight, and a cache salt."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dpray.serving.errors import ApiError
from dpray.serving.settings import LimitsConfig

ANYBODY = "anybody"
"""Every caller has this name where no key is needed."""


class Keys:
    """Recognizes the keys that may call, by their hashes alone."""

    def __init__(self, hashed: Sequence[str]) -> None:
        self._digests = [bytes.fromhex(each.removeprefix("sha256:")) for each in hashed]

    def caller(self, authorization: str) -> str:
        """Return the name of the caller with this `Authorization` header: the number of its key.

        Raises ApiError 401. Its time says nothing about the keys: a hash is compared, in constant
        time, with that of every key.
        """
        scheme, _, token = authorization.partition(" ")
        digest = hashlib.sha256(token.strip().encode("latin-1", "replace")).digest()
        found = [hmac.compare_digest(digest, each) for each in self._digests]
        if scheme.lower() != "bearer" or True not in found:
            message = "a valid API key is needed: Authorization: Bearer KEY"
            bearer = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, message, "invalid_api_key", headers=bearer)
        return str(found.index(True))


class InFlight:
    """Counts the requests in flight, in total and for each caller."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self._of: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self._of.total()

    @contextmanager
    def one(self, caller: str) -> Iterator[None]:
        """Count a request while it is in flight. Raises ApiError 429 where the limit is reached."""
        if self.total >= self._limits.max_in_flight:
            raise _too_many("too many requests in flight")
        if self._of[caller] >= self._limits.max_in_flight_per_key:
            raise _too_many("too many requests of this key in flight")
        self._of[caller] += 1
        try:
            yield
        finally:
            self._of[caller] -= 1


def _too_many(message: str) -> ApiError:
    return ApiError(429, message, "rate_limit_exceeded", headers={"Retry-After": "1"})


def cache_salt(secret: bytes, caller: str) -> str:
    """Return the salt of a caller's entries in vLLM's prefix cache, from a secret of this process.

    Without it, the time of an answer would tell a caller whether another one had sent some prompt.
    """
    return hmac.new(secret, caller.encode(), "sha256").hexdigest()


def is_loopback(client: Sequence[object] | None) -> bool:
    """Return whether an ASGI scope's `client` is this machine."""
    try:
        return client is not None and ipaddress.ip_address(str(client[0])).is_loopback
    except ValueError:
        return False
