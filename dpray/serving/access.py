"""Every caller has an API key and a cache salt."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Sequence

from dpray.serving.errors import ApiError

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


def cache_salt(secret: bytes, caller: str) -> str:
    """Return the salt of a caller's entries in vLLM's prefix cache, by all gateways' secret.

    Without it, the time of an answer would tell a caller whether another one had sent some prompt.
    """
    return hmac.new(secret, caller.encode(), "sha256").hexdigest()


def is_loopback(client: Sequence[object] | None) -> bool:
    """Return whether an ASGI scope's `client` is this machine."""
    try:
        return client is not None and ipaddress.ip_address(str(client[0])).is_loopback
    except ValueError:
        return False
