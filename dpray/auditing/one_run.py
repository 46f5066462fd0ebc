"""One run with many canaries bounds epsilon from below (Steinke, Nasr and Jagielski 2023, "Privacy
auditing with one (1) training run").

Each of m canaries joins the data by a fair coin of its own. From what the run released the auditor
guesses some of the coins. If the mechanism is (epsilon, delta)-DP, every guess is right with
probability e^epsilon / (1 + e^epsilon) or little more, whatever is known of the other coins: too
many right ones refute the claim. Nothing is assumed about how the canaries' parts in the output
depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt
from scipy import stats

from dpray.accounting.event import Event
from dpray.mechanisms.randomness import generator, new_key
from dpray.types import OnProgress, Progress

LARGEST_EPSILON = 60.0
SHARES = (0.0, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4)
"""Shares of the canaries that are guessed to be in, or out."""


def p_value(right: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """Bound the probability that `right` or more of `guesses` are right, under (epsilon, delta)-DP
    (Theorem 5.2).

    With W ~ Binomial(guesses, e^epsilon / (1 + e^epsilon)):
    `P[W >= right] + 2 m delta max_i P[right - i <= W < right] / i`, i from 1 to m. The second term
    pays for delta: with probability about 2 delta i / m it may give i guesses away.
    """
    accuracy = 1.0 / (1.0 + math.exp(-epsilon))
    tail = float(stats.binom.sf(right - 1, guesses, accuracy))
    # P[right - i <= W < right] stops growing at i = right, and is divided by i.
    below = np.cumsum(stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, accuracy))
    given_away = float((below / np.arange(1, right + 1)).max(initial=0.0))
    return min(1.0, tail + 2 * canaries * delta * given_away)


def one_run_bound(
    right: int, guesses: int, canaries: int, delta: float, alpha: float, tolerance: float = 1e-3
) -> float:
    """Return the largest epsilon refuted at `alpha`, less at most `tolerance`; 0 for none."""
    low, high = 0.0, LARGEST_EPSILON
    if p_value(right, guesses, canaries, low, delta) > alpha:
        return 0.0
    while high - low > tolerance:
        middle = (low + high) / 2
        if p_value(right, guesses, canaries, middle, delta) > alpha:
            high = middle
        else:
            low = middle
    return low


@dataclass(frozen=True)
class OneRun:
    """A `Target` that runs the mechanism once, with about half of the canaries.

    `draw(included)` includes the canaries whose `included` is true, and returns a score for each
    canary, larger if it seems to be in.

    The first half of the canaries chooses how many guesses to make, the second half makes them:
    the claim holds for the second half's coins even if the first half's are known.
    """

    name: str
    inputs: str
    event: Event
    draw: Callable[[npt.NDArray[np.bool_]], npt.NDArray[np.float64]]
    how: str = "one run"

    def most(self, trials: int, delta: float, alpha: float) -> float:
        half = trials - trials // 2
        return max(
            one_run_bound(guesses, guesses, half, delta, alpha)
            for guesses in {_number(2 * share, half) for share in SHARES if share}
        )

    def lower_bound(
        self, trials: int, delta: float, alpha: float, on_progress: OnProgress
    ) -> float:
        on_progress(Progress(self.name, 0, 1))
        included = generator(new_key()).random(trials) < 0.5
        scores = self.draw(included)
        on_progress(Progress(self.name, 1, 1))
        first, second = slice(trials // 2), slice(trials // 2, None)

        def bound(part: slice, shares: tuple[float, ...], tolerance: float) -> float:
            right, guesses = guess(scores[part], included[part], *shares)
            return one_run_bound(right, guesses, len(scores[part]), delta, alpha, tolerance)

        pairs = [pair for pair in product(SHARES, repeat=2) if any(pair)]
        return bound(second, max(pairs, key=lambda pair: bound(first, pair, 0.05)), 1e-3)


def guess(
    scores: npt.NDArray[np.float64],
    included: npt.NDArray[np.bool_],
    share_in: float,
    share_out: float,
) -> tuple[int, int]:
    """Guess that the highest scores are in, the lowest out; count the right guesses, and all."""
    ordered = included[np.argsort(scores, kind="stable")]
    guessed_in, guessed_out = _number(share_in, len(scores)), _number(share_out, len(scores))
    right = int(ordered[len(scores) - guessed_in :].sum() + (~ordered[:guessed_out]).sum())
    return right, guessed_in + guessed_out


def _number(share: float, canaries: int) -> int:
    return int(share * canaries)
