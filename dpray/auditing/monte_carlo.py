"""Draws from a mechanism in two neighbouring worlds bound its epsilon from below (Ding et al. 2018;
Jagielski et al. 2020).

Half of the draws choose an event; the other half, which it does not depend on, bound its two
probabilities. So the bound holds whatever the search for the event did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from dpray.accounting.event import Event
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
    `threshold`, taken to be likelier with the unit (or, with `without`, without it). Several
    thresholds are as many events."""

    statistic: int
    threshold: Any
    below: bool
    without: bool

    def bound(self, scores: tuple[Scores, Scores], delta: float, alpha: float) -> Any:
        """Bound epsilon by the scores of the worlds with and without the unit."""
        counts = []
        for side in scores:
            ordered = np.sort(side[self.statistic])
            if self.below:
                counts.append(np.searchsorted(ordered, self.threshold, side="right"))
            else:
                counts.append(len(ordered) - np.searchsorted(ordered, self.threshold, side="left"))
        likely, rare = reversed(counts) if self.without else counts
        return epsilon_lower_bound(likely, rare, scores[0].shape[1], delta, alpha)


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
        bound = float(chosen.bound((scores(True, rest), scores(False, rest)), delta, alpha))
        on_progress(Progress(self.name, drawn, 2 * trials))
        return bound


def best_event(scores: tuple[Scores, Scores], delta: float, alpha: float) -> SeenEvent:
    """Return the event with the best bound on these draws, in either direction."""
    found: list[tuple[float, SeenEvent]] = []
    for statistic, sides in enumerate(zip(*scores, strict=True)):
        thresholds = np.unique(np.concatenate(sides))
        if len(thresholds) > MOST_THRESHOLDS:
            ranks = np.linspace(0, len(thresholds) - 1, MOST_THRESHOLDS).round().astype(int)
            thresholds = thresholds[ranks]
        for below, without in product((False, True), repeat=2):
            events = SeenEvent(statistic, thresholds, below, without)
            bounds = events.bound(scores, delta, alpha)
            best = int(bounds.argmax())
            found.append((float(bounds[best]), replace(events, threshold=thresholds[best])))
    return max(found, key=lambda pair: pair[0])[1]
