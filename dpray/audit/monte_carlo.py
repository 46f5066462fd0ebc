"""A lower bound on epsilon by drawing from a mechanism in two neighbouring worlds (Ding et al.
2018; Jagielski et al. 2020).

Half of the draws choose an event; the other half, which it does not depend on, bound its two
probabilities. So the bound holds whatever the search for the event did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpray.accounting.events import Event
from dpray.audit.bounds import epsilon_lower_bound
from dpray.audit.target import Advance

Scores = npt.NDArray[np.float64]
"""Of shape (statistics, trials): what was seen of each draw, larger where the unit is there."""

MOST_THRESHOLDS = 400

CAUTION = 0.01
"""An event is chosen by its bound at this part of alpha: the best of hundreds of bounds is a rare
event's that was lucky, and luck does not last into the second half."""


@dataclass(frozen=True)
class SeenEvent:
    """That statistic number `statistic` is at least (or, with `below`, at most) `threshold`, held
    to be the likelier one where the unit is there (or, with `without`, where it is not)."""

    statistic: int
    threshold: float
    below: bool
    without: bool

    def bound(self, scores: tuple[Scores, Scores], delta: float, alpha: float) -> float:
        """`scores` of the worlds with and without the unit."""
        values = [side[self.statistic] for side in scores]
        seen = [(v <= self.threshold if self.below else v >= self.threshold).sum() for v in values]
        likely, rare = reversed(seen) if self.without else seen
        return float(epsilon_lower_bound(likely, rare, len(values[0]), delta, alpha))


@dataclass(frozen=True)
class MonteCarlo:
    """`draw(with_unit, trials)` runs the mechanism anew for each of the trials, in the world with
    the unit or in the one without it; `at_once` trials at a time."""

    name: str
    inputs: str
    event: Event
    draw: Callable[[bool, int], Scores]
    at_once: int = 500
    how: str = "Monte Carlo"

    def draws(self, trials: int) -> int:
        return 2 * trials

    def most(self, trials: int, delta: float, alpha: float) -> float:
        half = trials - trials // 2
        return float(epsilon_lower_bound(half, 0, half, delta, alpha))

    def lower_bound(self, trials: int, delta: float, alpha: float, advance: Advance) -> float:
        half = trials // 2
        chosen = best_event(self._both(half, advance), delta, alpha * CAUTION)
        return chosen.bound(self._both(trials - half, advance), delta, alpha)

    def _both(self, trials: int, advance: Advance) -> tuple[Scores, Scores]:
        return self._scores(True, trials, advance), self._scores(False, trials, advance)

    def _scores(self, with_unit: bool, trials: int, advance: Advance) -> Scores:
        parts = []
        for start in range(0, trials, self.at_once):
            number = min(self.at_once, trials - start)
            parts.append(self.draw(with_unit, number))
            advance(number)
        return np.concatenate(parts, axis=1)


def best_event(scores: tuple[Scores, Scores], delta: float, alpha: float) -> SeenEvent:
    """The event with the best bound on these draws, in either direction."""
    found: list[tuple[float, SeenEvent]] = []
    for statistic, (inside, outside) in enumerate(zip(*scores, strict=True)):
        trials = len(inside)
        thresholds = np.unique(np.concatenate([inside, outside]))
        if len(thresholds) > MOST_THRESHOLDS:
            ranks = np.linspace(0, len(thresholds) - 1, MOST_THRESHOLDS).round().astype(int)
            thresholds = thresholds[ranks]
        for below in (False, True):
            counts = [_count(side, thresholds, below) for side in (inside, outside)]
            for without in (False, True):
                likely, rare = reversed(counts) if without else counts
                bounds = epsilon_lower_bound(likely, rare, trials, delta, alpha)
                best = int(bounds.argmax())
                event = SeenEvent(statistic, float(thresholds[best]), below, without)
                found.append((float(bounds[best]), event))
    return max(found, key=lambda pair: pair[0])[1]


def _count(values: Scores, thresholds: Scores, below: bool) -> npt.NDArray[np.int64]:
    """How many values are at most, or at least, each threshold."""
    ordered = np.sort(values)
    if below:
        return np.searchsorted(ordered, thresholds, side="right")
    return len(values) - np.searchsorted(ordered, thresholds, side="left")
