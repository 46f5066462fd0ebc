"""Counts of events bound epsilon from below, by exact binomial confidence bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import stats


def clopper_pearson_lower(hits: Any, trials: int, alpha: float) -> Any:
    """Return, elementwise, what makes `hits` of `trials` or more as likely as `alpha` (Clopper and
    Pearson 1934). The true probability is below it with probability `alpha` at most."""
    hits = np.asarray(hits)
    return np.where(hits > 0, stats.beta.ppf(alpha, np.maximum(hits, 1), trials - hits + 1), 0.0)


def clopper_pearson_upper(hits: Any, trials: int, alpha: float) -> Any:
    """Return the upper bound: the true one is above it with probability `alpha` at most."""
    return 1.0 - clopper_pearson_lower(trials - np.asarray(hits), trials, alpha)


def epsilon_lower_bound(likely: Any, rare: Any, trials: int, delta: float, alpha: float) -> Any:
    """Bound epsilon by one event that was seen `likely` times in `trials` runs of one world and
    `rare` times in as many of its neighbour.

    (epsilon, delta)-DP says P <= e^epsilon Q + delta, so epsilon >= log((P - delta) / Q). P is
    bounded from below and Q from above, each at alpha / 2, so the true epsilon is below the result
    with probability `alpha` at most. 0 where nothing is proven. Elementwise.
    """
    p = clopper_pearson_lower(likely, trials, alpha / 2) - delta
    q = clopper_pearson_upper(rare, trials, alpha / 2)
    return np.log(np.maximum(p / q, 1.0))
