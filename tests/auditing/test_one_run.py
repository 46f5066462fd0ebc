"""The p-value of Steinke et al. (2023) against sums written out, and what it says of mechanisms
whose epsilon is known."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from dpray.accounting.events import Gaussian
from dpray.auditing import one_run
from dpray.auditing.one_run import OneRun, one_run_bound, p_value


def mass(w: int, guesses: int, accuracy: float) -> float:
    return math.comb(guesses, w) * accuracy**w * (1 - accuracy) ** (guesses - w)


@pytest.mark.parametrize(("right", "guesses", "epsilon"), [(3, 3, 0.0), (5, 7, 1.0), (0, 4, 2.0)])
def test_without_delta_it_is_the_binomial_tail(right: int, guesses: int, epsilon: float) -> None:
    accuracy = math.exp(epsilon) / (1 + math.exp(epsilon))
    tail = 0.0
    for coins in product((0, 1), repeat=guesses):
        if sum(coins) >= right:
            tail += math.prod(accuracy if coin else 1 - accuracy for coin in coins)
    assert p_value(right, guesses, 10, epsilon, 0.0) == pytest.approx(tail, rel=1e-12)


@pytest.mark.parametrize(("right", "guesses"), [(4, 5), (5, 9), (9, 9)])
def test_delta_pays_for_guesses_that_are_given_away(right: int, guesses: int) -> None:
    epsilon, delta, canaries = 0.7, 1e-3, 40
    accuracy = 1 / (1 + math.exp(-epsilon))
    largest = max(
        sum(mass(w, guesses, accuracy) for w in range(max(0, right - i), right)) / i
        for i in range(1, canaries + 1)
    )
    tail = sum(mass(w, guesses, accuracy) for w in range(right, guesses + 1))
    expected = tail + 2 * canaries * delta * largest
    assert p_value(right, guesses, canaries, epsilon, delta) == pytest.approx(expected, rel=1e-12)


def test_by_hand() -> None:
    """Ten right guesses of ten refute an accuracy below 0.05^(1/10) = 0.741: eps 1.052."""
    accuracy = 0.05**0.1
    expected = math.log(accuracy / (1 - accuracy))
    assert one_run_bound(10, 10, 10, 0.0, 0.05) == pytest.approx(expected, abs=1e-3)
    assert one_run_bound(5, 10, 10, 0.0, 0.05) == 0
    assert one_run_bound(10, 10, 10, 1e-2, 0.05) < expected
    assert one_run_bound(10, 10, 10, 0.2, 0.05) == 0


def responses(epsilon: float) -> OneRun:
    """Every coin told by randomised response."""
    rng = np.random.default_rng(7)

    def draw(included: np.ndarray) -> np.ndarray:
        accuracy = 1 / (1 + math.exp(-epsilon))
        truthful = rng.random(len(included)) < accuracy
        return np.where(truthful, included, ~included).astype(float)

    return OneRun("", "", Gaussian(1.0), draw)


def test_a_bound_is_above_the_truth_as_seldom_as_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Randomised response is the worst case of the theorem. 100 audits at 20 %: more than 33 false
    ones have probability 0.1 %, under the largest rate allowed."""
    monkeypatch.setattr(one_run, "SHARES", (0.0, 0.1, 0.4))
    target = responses(1.0)
    bounds = np.array(
        [target.lower_bound(400, 0.0, 0.2, lambda progress: None) for _ in range(100)]
    )
    assert (bounds > 1.0).sum() <= 33
    assert np.median(bounds) > 0.5


def test_too_large_an_epsilon_is_refuted() -> None:
    target = responses(3.0)
    assert target.lower_bound(4000, 0.0, 1e-6, lambda progress: None) > 2.0
    assert target.most(4000, 0.0, 1e-6) > 4.0


def test_delta_sets_a_floor_under_the_p_value() -> None:
    """2 m delta = 0.04 pays for more than one in a million: nothing is refuted at that level."""
    assert responses(3.0).most(4000, 1e-5, 1e-6) == 0
    assert responses(3.0).most(4000, 1e-5, 0.05) > 3.0
