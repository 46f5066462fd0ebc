"""Every unit joins with the right probability, independently of other units and other steps.

False-alarm rate of each test of randomness: at most 1e-6.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from dpray.mechanisms.randomness import generator, new_key
from dpray.methods.dp_sgd.algorithm import one_record_each, poisson_batch
from tests.statistical.two_sided import ALPHA, WRONG_SCALES

UNITS, STEPS, Q = 400, 2000, 0.1


def joined(steps: int = STEPS, q: float = Q) -> np.ndarray:
    """Return the batches as zeros and ones, a row per step and a column per unit."""
    rng = generator(new_key())
    rows = np.zeros((steps, UNITS))
    for row in rows:
        row[poisson_batch(UNITS, q, rng)] = 1
    return rows


def has_probability(successes: float, trials: int, q: float) -> bool:
    return bool(stats.binomtest(int(successes), trials, q).pvalue > ALPHA)


def correlations_fit(first: np.ndarray, second: np.ndarray) -> bool:
    """Return whether independent zeros and ones would be one together as often."""
    both = float((first * second).sum())
    return has_probability(both, first.size, Q * Q)


def test_units_join_with_probability_q() -> None:
    rows = joined()
    assert has_probability(rows.sum(), rows.size, Q)
    p_values = [stats.binomtest(int(n), STEPS, Q).pvalue for n in rows.sum(0)]
    assert min(p_values) > ALPHA / UNITS


@pytest.mark.parametrize("scale", WRONG_SCALES)
def test_another_probability_is_told_apart(scale: float) -> None:
    rows = joined(q=Q * scale)
    assert not has_probability(rows.sum(), rows.size, Q)


def test_units_join_independently_of_each_other() -> None:
    rows = joined()
    assert correlations_fit(rows[:, ::2], rows[:, 1::2])
    # A batch of a fixed size, or one that leaves units out by turns, has another variance.
    spread = rows.sum(1).var(ddof=1) * (STEPS - 1) / (UNITS * Q * (1 - Q))
    assert ALPHA / 2 < stats.chi2(STEPS - 1).cdf(spread) < 1 - ALPHA / 2


def test_steps_are_independent() -> None:
    rows = joined()
    assert correlations_fit(rows[::2], rows[1::2])


def test_the_tests_tell_shuffled_batches_apart() -> None:
    rng = np.random.default_rng(0)
    size = int(UNITS * Q)
    epochs = [rng.permutation(UNITS).reshape(-1, size) for _ in range(STEPS * size // UNITS)]
    rows = np.zeros((STEPS, UNITS))
    for row, batch in zip(rows, np.concatenate(epochs), strict=True):
        row[batch] = 1
    assert not correlations_fit(rows[::2], rows[1::2])


def test_an_empty_batch_and_a_whole_one() -> None:
    rng = generator(new_key())
    assert poisson_batch(5, 1e-12, rng).tolist() == []
    assert poisson_batch(5, 1.0, rng).tolist() == [0, 1, 2, 3, 4]
    assert poisson_batch(0, 0.5, rng).tolist() == []


@pytest.mark.parametrize("q", [0.0, -0.1, 1.5, float("nan")])
def test_q_is_a_probability(q: float) -> None:
    with pytest.raises(ValueError):
        poisson_batch(5, q, generator(new_key()))


def test_a_unit_brings_one_of_its_records_each_as_often() -> None:
    units = [["a"], ["b", "c", "d", "e"]]
    rng = generator(new_key())
    both = np.array([0, 1])
    draws = [one_record_each(units, both, rng) for _ in range(4000)]
    assert {draw[0] for draw in draws} == {"a"} and {len(draw) for draw in draws} == {2}
    counts = [sum(draw[1] == record for draw in draws) for record in "bcde"]
    assert stats.chisquare(counts).pvalue > ALPHA
