"""Binomial bounds against scipy's and by hand; the Monte-Carlo bound on mechanisms whose epsilon is
known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from dpray.accounting.events import DiscreteLaplace
from dpray.mechanisms.monte_carlo import (
    Target,
    audit_target,
    best_event,
    clopper_pearson_lower,
    clopper_pearson_upper,
    epsilon_lower_bound,
)
from dpray.types import InputError, Progress


def ignored(progress: Progress) -> None: ...


def target(draw: Callable[[bool, int], np.ndarray], epsilon: float = 1.0) -> Target:
    return Target("coin", "", DiscreteLaplace(1 / epsilon, 1), draw, at_once=300)


def coin(epsilon: float, seed: int = 3) -> Target:
    """Randomised response, told by a statistic that lies beside one that knows nothing."""
    rng = np.random.default_rng(seed)

    def draw(with_unit: bool, trials: int) -> np.ndarray:
        true = rng.random(trials) < 1 / (1 + math.exp(-epsilon))
        told = np.where(true, with_unit, not with_unit)
        return np.stack([rng.random(trials), told.astype(float)])

    return target(draw, epsilon)


def test_a_bound_is_above_the_truth_as_seldom_as_stated() -> None:
    """150 audits at 20 %: more than 46 false ones have probability 0.1 %, under the largest rate
    allowed. Two statistics, and thresholds by the hundred, are searched each time."""
    mechanism = coin(0.5)
    bounds = [mechanism.lower_bound(400, 0.0, 0.2, ignored) for _ in range(150)]
    assert sum(bound > 0.5 for bound in bounds) <= 46


def test_the_bound_comes_near_the_truth() -> None:
    assert 0.8 < audit_target(coin(1.0), 8000, 1e-6, 0.01).lower_bound < 1.0


def test_a_broken_claim_is_found_and_told_apart() -> None:
    broken = Target("coin", "", DiscreteLaplace(1.0, 1), coin(2.0).draw)
    found = audit_target(broken, 8000, 1e-6, 0.01)
    assert (
        found.claimed == pytest.approx(1.0, abs=1e-3)
        and found.lower_bound > 1.5
        and not found.holds
    )
    assert audit_target(coin(2.0), 8000, 1e-6, 0.01).holds


@pytest.mark.parametrize("shows", [True, False])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_either_world_may_be_the_one_that_shows(shows: bool, sign: float) -> None:
    """A value that one world alone ever gives, at either end of the scale."""

    def draw(with_unit: bool, trials: int) -> np.ndarray:
        values = np.zeros((1, trials))
        values[0, : trials // 10] = sign * (with_unit == shows)
        return values

    event = best_event((draw(True, 500), draw(False, 500)), 0.0, 0.05)
    assert event.without is not shows and event.below is (sign < 0)
    assert target(draw).lower_bound(1000, 0.0, 0.05, ignored) > 2.0


def test_delta_is_taken_off() -> None:
    """Laid open with probability 0.1, else nothing is said: (0, 0.1)-DP."""

    def draw(with_unit: bool, trials: int) -> np.ndarray:
        open_ = np.arange(trials) % 10 == 0
        return np.where(open_, with_unit, 0.0)[None]

    mechanism = target(draw)
    assert mechanism.lower_bound(2000, 0.1, 0.05, ignored) == 0
    assert mechanism.lower_bound(2000, 0.01, 0.05, ignored) > 2.0


def test_the_largest_bound_is_what_a_mechanism_that_hides_nothing_gives() -> None:
    mechanism = target(lambda with_unit, trials: np.full((1, trials), float(with_unit)))
    found = audit_target(mechanism, 1000, 1e-6, 0.05)
    assert found.lower_bound == pytest.approx(found.most, abs=1e-12) and found.most > 4


def test_progress_counts_the_draws() -> None:
    seen: list[Progress] = []
    audit_target(coin(1.0), 1000, 1e-6, 0.05, seen.append)
    assert seen[0] == Progress("coin", 0, 2000) and seen[-1] == Progress("coin", 2000, 2000)
    assert [at.completed for at in seen] == sorted(at.completed for at in seen)


def test_too_few_trials_are_refused() -> None:
    with pytest.raises(InputError, match=r"trials: 199 prove nothing; at least 200 are needed"):
        audit_target(coin(1.0), 199, 1e-6, 0.05)


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
