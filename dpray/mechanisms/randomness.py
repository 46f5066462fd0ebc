"""Every draw of floating-point noise comes from a generator of this module.

A generator is ChaCha20 keyed with 256 bits of the operating system's entropy. The key is explicit:
ranks that must draw the same token get the same key, and nothing depends on a global generator. A
key is used for one purpose once; a repeated mechanism draws with a new key.
"""

from __future__ import annotations

import hashlib
import secrets

import numpy as np
from randomgen import ChaCha

NOISE_SOURCE = (
    "ChaCha20 keyed with 256 bits of operating-system entropy; "
    "real-valued noise is drawn in float64 (floating-point caveat: the samplers of real-valued "
    "noise are not the exact ones of the theory)"
)


def new_key() -> str:
    """Return 256 bits from the operating system, as 64 hexadecimal digits (so that it can be
    JSON)."""
    return secrets.token_hex(32)


def new_salt() -> str:
    """Return a public salt, fixed for a run: 128 bits as hexadecimal digits."""
    return secrets.token_hex(16)


class SecretKey(str):
    """A key that `repr` hides. Functions that are sent to workers hold it, and Ray logs the
    beginning of their reprs."""

    def __repr__(self) -> str:
        return "SecretKey(...)"


def generator(key: str) -> np.random.Generator:
    """Return the generator of a `new_key()`; the same key gives the same draws on every machine.

    >>> key = new_key()
    >>> bool(generator(key).normal() == generator(key).normal())
    True
    """
    if len(key) != 64:
        raise ValueError("a key is 64 hexadecimal digits")
    return np.random.Generator(ChaCha(key=int(key, 16), rounds=20))


def named_key(secret_or_salt: str, *names: str) -> str:
    """Derive a key from a secret or a salt (hexadecimal digits) and names, by BLAKE2b as a keyed
    pseudorandom function.

    A key from a public salt is for PUBLIC randomness (prompts, draws from noisy outputs), and never
    for noise. A key from a secret `new_key()` is as secret as that.

    >>> named_key("5a", "prompt", "1") == named_key("5a", "prompt", "1")
    True
    >>> named_key("5a", "prompt", "1") == named_key("5a", "prompt", "2")
    False
    """
    digest = hashlib.blake2b(key=bytes.fromhex(secret_or_salt), digest_size=32)
    for i, name in enumerate(names):
        encoded = name.encode("utf-8", "surrogatepass")
        # All but the last name are preceded by their length: no two lists of names run together.
        if i < len(names) - 1:
            digest.update(len(encoded).to_bytes(8, "big"))
        digest.update(encoded)
    return digest.hexdigest()
