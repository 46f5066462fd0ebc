"""The Monte-Carlo bound on mechanisms whose epsilon is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from dpray.accounting.events import Laplace
from dpray.auditing.monte_carlo import MonteCarlo, best_event
from dpray.auditing.target import audit_target
from dpray.types import InputError, Progress


def ignored(progress: Progress) -> None: ...


def target(draw: Callable[[bool, int], np.ndarray], epsilon: float = 1.0) -> MonteCarlo:
    return MonteCarlo("coin", "", Laplace(1 / epsilon), draw, at_once=300)


def coin(epsilon: float, seed: int = 3) -> MonteCarlo:
    """Randomised response, told by a statistic that lies beside one that knows nothing."""
    rng = np.random.default_rng(seed)

    def draw(with_unit: bool, trials: int) -> np.ndarray:
        true = rng.random(trials) < 1 / (1 + math.exp(-epsilon))
        told = np.where(true, with_unit, not with_unit)
        return np.stack([rng.random(trials), told.astype(float)])

    return target(draw, epsilon)


def test_a_bound_is_above_the_truth_as_seldom_as_stated() -> None:
    """300 audits at 20 %: more than 82 false ones have probability 0.1 %, under the largest rate
    allowed. Two statistics, and thresholds by the hundred, are searched each time."""
    mechanism = coin(0.5)
    bounds = [mechanism.lower_bound(400, 0.0, 0.2, ignored) for _ in range(300)]
    assert sum(bound > 0.5 for bound in bounds) <= 82


def test_the_bound_comes_near_the_truth() -> None:
    assert 0.8 < audit_target(coin(1.0), 8000, 1e-6, 0.01).lower_bound < 1.0


def test_a_broken_claim_is_found_and_told_apart() -> None:
    broken = MonteCarlo("coin", "", Laplace(1.0), coin(2.0).draw)
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
    with pytest.raises(InputError, match=r"trials: 199 prove nothing, it takes 200 or more"):
        audit_target(coin(1.0), 199, 1e-6, 0.05)
