"""What counts of events prove about epsilon: exact binomial confidence bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import stats


def clopper_pearson_lower(hits: Any, trials: int, alpha: float) -> Any:
    """The smallest probability that makes `hits` of `trials` or more as likely as `alpha` (Clopper
    and Pearson 1934): the true one is below it with probability `alpha` at most. Elementwise."""
    hits = np.asarray(hits)
    return np.where(hits > 0, stats.beta.ppf(alpha, np.maximum(hits, 1), trials - hits + 1), 0.0)


def clopper_pearson_upper(hits: Any, trials: int, alpha: float) -> Any:
    """The mirror image: the true probability is above it with probability `alpha` at most."""
    return 1.0 - clopper_pearson_lower(trials - np.asarray(hits), trials, alpha)


def epsilon_lower_bound(likely: Any, rare: Any, trials: int, delta: float, alpha: float) -> Any:
    """A bound on epsilon from how often one event was seen in `trials` runs in each of two
    neighbouring worlds: `likely` times in one, `rare` times in the other.

    (epsilon, delta)-DP says P <= e^epsilon Q + delta, so epsilon >= log((P - delta) / Q). P is
    bounded from below and Q from above, each at alpha / 2: epsilon is below the bound with
    probability `alpha` at most. 0 where nothing is proven. Elementwise.
    """
    p = clopper_pearson_lower(likely, trials, alpha / 2) - delta
    q = clopper_pearson_upper(rare, trials, alpha / 2)
    return np.log(np.maximum(p / q, 1.0))
