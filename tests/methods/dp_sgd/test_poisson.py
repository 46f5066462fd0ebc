"""Every unit joins with the right probability, independently of other units and other steps.

False-alarm rate of each test of randomness: at most 1e-6.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from scipy import stats

from dpray.mechanisms.randomness import generator, new_key
from dpray.methods.dp_sgd import algorithm
from dpray.methods.dp_sgd.algorithm import (
    COIN_BITS,
    COINS_AT_ONCE,
    binomial,
    fair_coins,
    one_record_each,
    poisson_batch,
)
from tests.statistical.two_sided import ALPHA, fits_probabilities

UNITS, STEPS, Q = 400, 2000, 0.1


def joined() -> np.ndarray:
    """Return the batches as zeros and ones, a row per step and a column per unit."""
    rng = generator(new_key())
    rows = np.zeros((STEPS, UNITS))
    for row in rows:
        row[poisson_batch(UNITS, Q, rng)] = 1
    return rows


def has_probability(successes: float, trials: int, q: float) -> bool:
    return bool(stats.binomtest(int(successes), trials, q).pvalue > ALPHA)


def correlations_fit(first: np.ndarray, second: np.ndarray) -> bool:
    """Return whether independent zeros and ones would be one together as often."""
    both = float((first * second).sum())
    return has_probability(both, first.size, Q * Q)


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


Sampler = Callable[[int, float, np.random.Generator], np.ndarray]
FEW, DRAWS = 5, 6000


def fixed_number(units: int, q: float, rng: np.random.Generator) -> np.ndarray:
    return rng.choice(units, round(q * units), replace=False)


def with_replacement(units: int, q: float, rng: np.random.Generator) -> np.ndarray:
    """The right number, but a unit may be drawn twice."""
    number = binomial(units, round(q * 2**COIN_BITS), rng)
    return np.unique(rng.integers(units, size=number))


def not_by_chance(units: int, q: float, rng: np.random.Generator) -> np.ndarray:
    """The right number, but neighbours join together."""
    number = binomial(units, round(q * 2**COIN_BITS), rng)
    return (int(rng.integers(units)) + np.arange(number)) % units


def draws(sampler: Sampler, units: int, q: float) -> Counter[tuple[int, ...]]:
    rng = generator(new_key())
    return Counter(tuple(sorted(map(int, sampler(units, q, rng)))) for _ in range(DRAWS))


def sets_fit(drawn: Counter[tuple[int, ...]], units: int, q: float) -> bool:
    """Return whether all sets of units come as often as independent coins of chance q have them:
    with that, so do their numbers, the pairs, and whatever else."""
    sets = [tuple(np.flatnonzero(joins).tolist()) for joins in product((False, True), repeat=units)]
    chances = [q ** len(each) * (1 - q) ** (units - len(each)) for each in sets]
    return fits_probabilities([drawn[each] for each in sets], chances)


def numbers_fit(drawn: Counter[tuple[int, ...]], units: int, q: float) -> bool:
    numbers = np.zeros(units + 1, dtype=int)
    for each, times in drawn.items():
        numbers[len(each)] += times
    return fits_probabilities(numbers.tolist(), stats.binom(units, q).pmf(np.arange(units + 1)))


@pytest.mark.parametrize(("units", "q"), [(FEW, 0.3), (FEW + 1, 0.5)])
def test_every_set_of_units_comes_as_often_as_by_independent_coins(units: int, q: float) -> None:
    drawn = draws(poisson_batch, units, q)
    assert sets_fit(drawn, units, q) and numbers_fit(drawn, units, q)
    assert not numbers_fit(drawn, units + 1, q)


@pytest.mark.parametrize("wrong", [fixed_number, with_replacement, not_by_chance])
def test_other_samplers_are_told_apart(wrong: Sampler) -> None:
    assert not sets_fit(draws(wrong, FEW, 0.3), FEW, 0.3)


@pytest.mark.parametrize(("units", "q"), [(12_000, 0.1), (12_000, 0.01)])
def test_units_join_independently_where_sets_are_drawn_in_other_ways(units: int, q: float) -> None:
    """Large sets are drawn by a shuffle, small ones of many by rejection."""
    rng = generator(new_key())
    rows = np.zeros((200, units))
    for row in rows:
        batch = poisson_batch(units, q, rng)
        assert (np.diff(batch) > 0).all()
        row[batch] = 1
    assert has_probability(rows.sum(), rows.size, q)
    assert has_probability((rows[:, ::2] * rows[:, 1::2]).sum(), rows.size // 2, q * q)
    assert has_probability((rows[:, :6000] * rows[:, 6000:]).sum(), rows.size // 2, q * q)
    parts = rows.reshape(200, 12, -1).sum((0, 2))
    assert fits_probabilities(parts.astype(int).tolist(), [1 / 12] * 12)


@pytest.mark.parametrize("threshold", [0, 1, 2**COIN_BITS - 1, 2**COIN_BITS])
def test_certain_and_impossible_coins(threshold: int) -> None:
    rng = generator(new_key())
    assert binomial(10_000, threshold, rng) == (10_000 if threshold > 1 else 0)


@pytest.mark.parametrize("q", [1e-9, 3e-7, 1 / 3, 0.1, 1 - 2**-53, 1.0])
def test_no_unit_joins_more_often_than_the_step_states(
    q: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With q rounded up, a unit joined more often than at 1e-9, by a relative 8e-8."""
    thresholds: list[int] = []
    monkeypatch.setattr(algorithm, "binomial", lambda _, least, __: thresholds.append(least) or 0)
    poisson_batch(10, q, generator(new_key()))
    assert Fraction(q) - Fraction(1, 2**COIN_BITS) < Fraction(thresholds[0], 2**COIN_BITS) <= q


@pytest.mark.parametrize("coins", [0, 1, 64, 65, 1000])
def test_fair_coins_are_the_bits_of_random_words(coins: int) -> None:
    key = new_key()
    words = generator(key).integers(2**64, size=-(-coins // 64), dtype=np.uint64)
    bits = "".join(f"{int(word):064b}" for word in words)
    last = bits[-64:][: coins - 64 * (len(words) - 1)] if coins else ""
    expected = bits[:-64].count("1") + last.count("1")
    assert fair_coins(coins, generator(key)) == expected


def test_many_fair_coins_are_drawn_in_parts() -> None:
    assert has_probability(
        fair_coins(COINS_AT_ONCE + 99, generator(new_key())), COINS_AT_ONCE + 99, 0.5
    )


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
