"""A private selection runs a random number of times and keeps the best output (Papernot and Steinke
2022)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True)
class TruncatedNegativeBinomial:
    """A `TruncatedNegativeBinomial` is the law of the number of runs K (Papernot and Steinke 2022,
    Definition 1).

    With eta = `shape` >= 0 and `gamma` in (0, 1), P(K = k) is proportional to `(1 - gamma)^k` times
    the product of `(l + eta) / (l + 1)` over l from 1 to k-1, for k = 1, 2, ...; for eta 0 that is
    the logarithmic law, for eta 1 the geometric one.
    """

    shape: float
    gamma: float

    def draw(self, rng: np.random.Generator) -> int:
        """Draw K, by inversion. Where rounding leaves less than a float64 can hold, the largest k
        that has a probability is drawn."""
        left, k, probability = rng.random(), 1, self._of_one()
        while left >= probability > 0:
            left -= probability
            probability *= (1 - self.gamma) * (k + self.shape) / (k + 1)
            k += 1
        return k

    def _of_one(self) -> float:
        if self.shape == 0:
            return (1 - self.gamma) / math.log(1 / self.gamma)
        return self.shape * (1 - self.gamma) / math.expm1(-self.shape * math.log(self.gamma))


def best(scored: Iterable[tuple[int, T]]) -> T:
    """Return the output with the highest score, of equal ones the first: among independent outputs
    that is one of them at random. Nothing of the others is kept."""
    runs = iter(scored)
    highest, found = next(runs)
    for score, output in runs:
        if score > highest:
            highest, found = score, output
    return found
