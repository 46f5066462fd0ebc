"""Canaries: made-up records with a secret, and how well a release kept it (Yue et al. 2023, 4.5 and
Table 8; exposure by Carlini et al. 2019, "The Secret Sharer").

Nothing in here is private: sentences and secrets are made up anew for every audit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

REPETITIONS = (1, 10, 100)

_CONSONANTS, _VOWELS, _LETTERS = "bdfgklmnprstvz", "aeiou", "ABCDEFGHJKLMNPRSTVWXYZ"


def _digits(rng: np.random.Generator, *groups: int) -> str:
    return "-".join("".join(map(str, rng.integers(10, size=size))) for size in groups)


def _word(rng: np.random.Generator, syllables: int) -> str:
    pairs = rng.integers(0, [len(_CONSONANTS), len(_VOWELS)], size=(syllables, 2))
    return "".join(_CONSONANTS[c] + _VOWELS[v] for c, v in pairs)


def _name(rng: np.random.Generator) -> str:
    return f"{_word(rng, 3).capitalize()} {_word(rng, 3).capitalize()}"


def _address(rng: np.random.Generator) -> str:
    return f"{rng.integers(100, 9999)} {_word(rng, 3).capitalize()} Street"


def _email(rng: np.random.Generator) -> str:
    return f"{_word(rng, 3)}{rng.integers(10, 99)}@mail.example"


def _plate(rng: np.random.Generator) -> str:
    letters = "".join(_LETTERS[i] for i in rng.integers(len(_LETTERS), size=3))
    return f"{letters} {_digits(rng, 3)}"


@dataclass(frozen=True)
class Kind:
    """A sentence with a place for a secret, and how its secrets are made: many millions differ."""

    name: str
    sentence: str
    secret: Callable[[np.random.Generator], str]


KINDS = (
    Kind("name", "I am {}, and nobody here ever had a better idea than this.", _name),
    Kind("address", "They sent it to {} instead, three hours late!", _address),
    Kind(
        "number", "Call {} and ask for me, I said, but nobody did.", lambda r: _digits(r, 3, 3, 4)
    ),
    Kind("e-mail", "Since then {} gets an advertisement from them every day.", _email),
    Kind("plate", "The car had the plate {} and stood there all night.", _plate),
)


@dataclass(frozen=True)
class Canary:
    kind: Kind
    secret: str
    repetitions: int

    @property
    def text(self) -> str:
        return self.kind.sentence.format(self.secret)


def make_canaries(rng: np.random.Generator) -> list[Canary]:
    """One of every kind for each number of repetitions, with a secret of its own."""
    return [Canary(kind, kind.secret(rng), times) for times in REPETITIONS for kind in KINDS]


def look_alikes(canary: Canary, number: int, rng: np.random.Generator) -> list[str]:
    """`number` different texts with other secrets of the same kind."""
    secrets: dict[str, None] = {}
    while len(secrets) < number:
        secret = canary.kind.secret(rng)
        if secret != canary.secret:
            secrets[secret] = None
    return [canary.kind.sentence.format(secret) for secret in secrets]


def rank(loss: float, losses: npt.NDArray[np.floating]) -> float:
    """Of the canary among its look-alikes and itself, by perplexity, lowest first; 1 is best, and a
    tie counts by half."""
    return 1 + float((losses < loss).sum()) + float((losses == loss).sum()) / 2


def exposure(rank: float, candidates: int) -> float:
    """Bits that the model gives away of the secret: `log2(candidates) - log2(rank)`; about 1.4 on
    average where it knows nothing."""
    return math.log2(candidates) - math.log2(rank)


def leaks(secret: str, texts: Sequence[str]) -> int:
    """Texts that hold the secret, word for word."""
    return sum(secret in text for text in texts)
