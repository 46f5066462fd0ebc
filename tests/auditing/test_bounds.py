"""Binomial bounds against scipy's, and what they say about epsilon by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from dpray.auditing.bounds import (
    clopper_pearson_lower,
    clopper_pearson_upper,
    epsilon_lower_bound,
)


@pytest.mark.parametrize("hits", [0, 1, 17, 99, 100])
def test_bounds_are_those_of_scipy(hits: int) -> None:
    for alpha in (0.05, 1e-6):
        test = stats.binomtest(hits, 100).proportion_ci(1 - 2 * alpha, method="exact")
        assert clopper_pearson_lower(hits, 100, alpha) == pytest.approx(test.low, abs=1e-9)
        assert clopper_pearson_upper(hits, 100, alpha) == pytest.approx(test.high, abs=1e-9)


def test_an_event_that_is_always_seen_in_one_world_and_never_in_the_other() -> None:
    """p^100 = 0.025 gives p = 0.9638, and 1 - p is the other one's bound."""
    p = 0.025 ** (1 / 100)
    bound = epsilon_lower_bound(100, 0, 100, 1e-3, 0.05)
    assert bound == pytest.approx(math.log((p - 1e-3) / (1 - p)), abs=1e-9)


def test_nothing_is_proven_by_equal_counts_the_wrong_order_or_a_large_delta() -> None:
    likely = np.array([50, 20, 100])
    rare = np.array([50, 80, 10])
    bounds = epsilon_lower_bound(likely, rare, 100, 0.0, 0.05)
    assert (bounds[:2] == 0).all() and bounds[2] > 1.5
    assert epsilon_lower_bound(100, 10, 100, 0.9, 0.05) == 0
