"""Draws from a mechanism in two neighbouring worlds bound its epsilon from below (Ding et al. 2018;
Jagielski et al. 2020).

Half of the draws choose an event; the other half, which it does not depend on, bound its two
probabilities. So the bound holds whatever the search for the event did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpray.accounting.events import Event
from dpray.auditing.bounds import epsilon_lower_bound
from dpray.types import OnProgress, Progress

Scores = npt.NDArray[np.float64]
"""Holds the statistics of each draw, shape (statistics, trials), larger where the unit is there."""

MOST_THRESHOLDS = 400

CAUTION = 0.01
"""An event is chosen by its bound at this share of alpha: the best of hundreds of bounds belongs to
a rare event that was lucky, and luck does not last into the second half."""


@dataclass(frozen=True)
class SeenEvent:
    """Names the event that statistic number `statistic` is at least (or, with `below`, at most)
    `threshold`, taken to be likelier with the unit (or, with `without`, without it)."""

    statistic: int
    threshold: float
    below: bool
    without: bool

    def bound(self, scores: tuple[Scores, Scores], delta: float, alpha: float) -> float:
        """Bound epsilon by the scores of the worlds with and without the unit."""
        values = [side[self.statistic] for side in scores]
        seen = [(v <= self.threshold if self.below else v >= self.threshold).sum() for v in values]
        likely, rare = reversed(seen) if self.without else seen
        return float(epsilon_lower_bound(likely, rare, len(values[0]), delta, alpha))


@dataclass(frozen=True)
class MonteCarlo:
    """Is a `Target` whose `draw(with_unit, trials)` runs the mechanism independently for each of at
    most `at_once` trials, in the world with the unit or in the one without it."""

    name: str
    inputs: str
    event: Event
    draw: Callable[[bool, int], Scores]
    at_once: int = 500
    how: str = "Monte Carlo"

    def most(self, trials: int, delta: float, alpha: float) -> float:
        half = trials - trials // 2
        return float(epsilon_lower_bound(half, 0, half, delta, alpha))

    def lower_bound(
        self, trials: int, delta: float, alpha: float, on_progress: OnProgress
    ) -> float:
        drawn = 0

        def scores(with_unit: bool, number: int) -> Scores:
            nonlocal drawn
            parts = []
            for start in range(0, number, self.at_once):
                on_progress(Progress(self.name, drawn, 2 * trials))
                parts.append(self.draw(with_unit, min(self.at_once, number - start)))
                drawn += parts[-1].shape[1]
            return np.concatenate(parts, axis=1)

        half = trials // 2
        chosen = best_event((scores(True, half), scores(False, half)), delta, alpha * CAUTION)
        rest = trials - half
        bound = chosen.bound((scores(True, rest), scores(False, rest)), delta, alpha)
        on_progress(Progress(self.name, drawn, 2 * trials))
        return bound


def best_event(scores: tuple[Scores, Scores], delta: float, alpha: float) -> SeenEvent:
    """Return the event with the best bound on these draws, in either direction."""
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
    """Count the values that are at most, or at least, each threshold."""
    ordered = np.sort(values)
    if below:
        return np.searchsorted(ordered, thresholds, side="right")
    return len(values) - np.searchsorted(ordered, thresholds, side="left")
