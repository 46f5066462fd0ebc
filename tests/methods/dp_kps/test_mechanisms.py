"""Random Fourier features, their sums, and the kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.events import DiscreteLaplace, Gaussian
from dpray.methods.dp_kps.mechanisms import (
    GRID,
    LARGEST,
    RECORDS_AT_ONCE,
    FeatureSum,
    FourierFeatures,
    VocabularyHistogram,
    density,
    record_averages,
    record_prefixes,
)

N, D, I = 9, 5, 40  # noqa: E741
FEATURES = FourierFeatures(dimension=D, number=I, bandwidth=1.0, seed=3)
PREFIXES = FourierFeatures(D, I, bandwidth=0.7, seed=4, blocks=4, block_norm=0.5)
SUM = FeatureSum(I, "laplace", 1.0)


def unit_vectors(number: int, dimension: int = D, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((number, dimension))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


TERMS = unit_vectors(N)


def test_features_are_the_paper_s() -> None:
    x = TERMS[:2]
    w = np.random.default_rng([3, 0, 0]).standard_normal((D, I))
    b = np.random.default_rng([3, 1]).uniform(0, 2 * math.pi, I)
    wide = FourierFeatures(D, I, bandwidth=2.0, seed=3)
    expected = math.sqrt(2) * np.cos(math.sqrt(2) * x @ w / 2.0 + b)
    np.testing.assert_allclose(wide(x), expected, atol=1e-12)


def test_a_prefix_is_a_point_padded_with_zeros() -> None:
    """Angles of blocks add up to those of the concatenation, of squared norm u a block."""
    angles = [PREFIXES.angles(TERMS, block) for block in range(4)]
    (features,) = record_prefixes(PREFIXES, angles, [[3, 1, 2], [5, 6, 7, 8, 0], [4]], shortest=2)
    w = np.concatenate([np.random.default_rng([4, 0, j]).standard_normal((D, I)) for j in range(4)])
    none = np.zeros(D)
    points = np.array(
        [
            np.concatenate([TERMS[3], TERMS[1], TERMS[2], none]),
            np.concatenate([TERMS[5], TERMS[6], TERMS[7], TERMS[8]]),
        ]
    )
    arguments = math.sqrt(2) * math.sqrt(0.5) * points @ w / 0.7 + PREFIXES.phases
    np.testing.assert_allclose(features, math.sqrt(2) * np.cos(arguments), atol=1e-12)


def test_a_record_s_vectors_are_averaged() -> None:
    table = FEATURES(TERMS)
    (averages,) = record_averages(table, [[1, 2, 5], [], [0]])
    np.testing.assert_allclose(averages, [table[[1, 2, 5]].mean(axis=0), table[0]], atol=1e-12)


def averaged(records: list[list[int]]) -> np.ndarray:
    return SUM.sum(record_averages(FEATURES(TERMS), records))


def prefixed(records: list[list[int]]) -> np.ndarray:
    angles = [PREFIXES.angles(TERMS, block) for block in range(PREFIXES.blocks)]
    return SUM.sum(record_prefixes(PREFIXES, angles, records, shortest=1))


def moves(
    sums: Callable[[list[list[int]]], np.ndarray], records: list[list[int]], new: list[list[int]]
) -> bool:
    """Whether the records `new` of one unit move the sums by no more than `FeatureSum` claims."""
    mechanism = FeatureSum(I, "laplace", 1.0, records_per_unit=len(new))
    moved = sums([*records, *new]) - sums(records)
    l1, l2_squared = int(np.abs(moved).sum()), sum(int(step) ** 2 for step in moved)
    return bool(
        l1 <= I * mechanism.feature_sensitivity
        and l2_squared <= I * (LARGEST * len(new)) ** 2 <= mechanism.l2_sensitivity**2
        and np.abs(moved).max() <= mechanism.feature_sensitivity == LARGEST * len(new)
    )


record = st.lists(st.integers(0, N - 1), max_size=6)


@given(records=st.lists(record, max_size=5), new=st.lists(record, min_size=1, max_size=3))
def test_a_unit_moves_the_sums_by_at_most_their_sensitivity(
    records: list[list[int]], new: list[list[int]]
) -> None:
    assert moves(averaged, records, new)
    assert moves(prefixed, records, new)


def test_the_same_check_catches_vectors_that_are_not_averaged() -> None:
    table = FEATURES(TERMS)

    def added(records: list[list[int]]) -> np.ndarray:
        whole = sum((table[terms].sum(axis=0) for terms in records), np.zeros(I))
        return np.trunc(whole * GRID).astype(np.int64)

    assert moves(added, [], [[1]])
    assert not moves(added, [], [[1, 1, 1]])
    assert not moves(added, [[0]], [[2, 5, 3, 1, 4, 8]])


def test_a_row_that_is_too_large_is_cut_to_what_a_record_may_give() -> None:
    total = SUM.sum([np.full((1, I), 7.0), np.full((1, I), -7.0), np.full((1, I), 7.0)])
    assert total.tolist() == [LARGEST] * I
    assert math.isqrt(2 << 48) == LARGEST


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_no_number_moves_no_more_than_another(bad: float) -> None:
    total = SUM.sum([np.full((1, I), bad)])
    assert -LARGEST <= total.min() <= total.max() <= LARGEST


def test_the_sensitivity_is_nearly_reached() -> None:
    """A point where all cosines are nearly 1 (w.x = -b / sqrt(2), solvable as D > I)."""
    features = FourierFeatures(dimension=60, number=10, bandwidth=1.0, seed=5)
    w, b = features.angles(np.eye(60)), features.phases
    x = np.linalg.lstsq(w.T, -b, rcond=None)[0]
    moved = FeatureSum(10, "laplace", 1.0).sum([features(x[None])])
    mechanism = FeatureSum(10, "laplace", 1.0)
    assert 0.9999 < np.abs(moved).min() / mechanism.feature_sensitivity <= 1
    assert 0.9999 < np.linalg.norm(moved) / mechanism.l2_sensitivity <= 1


@given(records=st.lists(record, max_size=12), cut=st.integers(0, 12), seed=st.integers(0, 99))
def test_sums_depend_on_neither_order_nor_shards(
    records: list[list[int]], cut: int, seed: int
) -> None:
    """To the last bit."""
    shuffled = [records[i] for i in np.random.default_rng(seed).permutation(len(records))]
    whole = averaged(records)
    assert (averaged(shuffled[:cut]) + averaged(shuffled[cut:]) == whole).all()
    parts = prefixed(shuffled[:cut]) + prefixed(shuffled[cut:])
    assert (parts == prefixed(records)).all()


def test_more_records_than_are_summed_at_once() -> None:
    records = [[i % N, (i * i) % N] for i in range(RECORDS_AT_ONCE + 9)]
    assert (averaged(records) == averaged(records[:99]) + averaged(records[99:])).all()
    assert averaged([]).tolist() == [0] * I


def test_the_sums_of_more_records_than_a_float_can_count() -> None:
    """2^30 records, as shards of 2^20: a sum of 2^54.5 steps, and one record more."""
    shard = SUM.sum([np.full((1, I), 7.0)]) * 2**20
    most = sum([shard] * 2**10)
    one_more = most + SUM.sum([np.full((1, I), 3 / GRID)])
    assert (one_more - most).tolist() == [3] * I
    assert most[0] == LARGEST * 2**30 > 2**53


def test_events_and_scales() -> None:
    laplace = FeatureSum(1000, "laplace", 0.2, records_per_unit=2)
    assert laplace.dp_event == SelfComposed(DiscreteLaplace(laplace.grid_scale, 2 * LARGEST), 1000)
    assert laplace.dp_event.pure_epsilon() == pytest.approx(5.0, rel=1e-15)
    assert laplace.scale == pytest.approx(2 * math.sqrt(2) * 1000 / 5.0)
    gaussian = FeatureSum(1000, "gaussian", 0.9, records_per_unit=2)
    assert gaussian.dp_event == Gaussian(0.9)
    assert gaussian.scale == pytest.approx(0.9 * 2 * math.sqrt(2000))


@given(
    number=st.integers(1, 10**5),
    k=st.integers(1, 100),
    multiplier=st.floats(0.01, 0.1) | st.floats(0.1, 20.0),
)
def test_no_rounding_makes_the_noise_cost_more_than_the_multiplier_says(
    number: int, k: int, multiplier: float
) -> None:
    laplace = FeatureSum(number, "laplace", multiplier, k)
    assert laplace.dp_event.pure_epsilon() <= 1 / multiplier
    gaussian = FeatureSum(number, "gaussian", multiplier, k)
    least = Fraction(multiplier) ** 2 * number * (LARGEST * k) ** 2 + 9
    assert least <= Fraction(gaussian.grid_scale) ** 2 <= least * (1 + Fraction(1, 10**13))


@pytest.mark.parametrize(("s", "t"), [(0.3, 0.5), (2.0, 0.6)])
def test_gaussian_noise_rounded_at_random_is_discrete_gaussian_noise(s: float, t: float) -> None:
    """The docstring of `FeatureSum` says how nearly, and of which variance."""
    n = np.arange(-60, 61)
    x = np.linspace(-60, 60, 120_001)
    rounding_XN = np.exp(-((n - x[:, None]) ** 2) / (2 * t**2))
    rounding_XN /= rounding_XN.sum(axis=1, keepdims=True)
    found = np.exp(-(x**2) / (2 * s**2)) @ rounding_XN

    def error(variance: float) -> float:
        exact = np.exp(-(n**2) / (2 * variance))
        ratio = (found / found.sum()) / (exact / exact.sum())
        return float(np.abs(ratio[np.abs(n) <= 4 * s] - 1).max())

    factor = 5 * math.exp(-2 * math.pi**2 * t**2)
    assert error(s**2 + t**2) < factor < error(s**2)


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
def test_noise_that_no_integer_holds_is_refused(noise: Any) -> None:
    largest = FeatureSum(1, noise, 1e8)
    assert np.isfinite(largest(np.zeros(1, dtype=np.int64))).all()
    with pytest.raises(ValueError, match="too large for integer noise"):
        FeatureSum(1, noise, 1e9)
    with pytest.raises(ValueError, match="must be positive"):
        FeatureSum(1, noise, 0.0)


def test_sums_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        SUM(np.zeros(I + 1, dtype=np.int64))


def test_the_density_is_not_divided_by_the_number_of_records() -> None:
    features = FourierFeatures(D, 20_000, 1.0, seed=6)
    table = features(TERMS)
    sums = FeatureSum(20_000, "laplace", 1.0).sum(record_averages(table, [[2]] * 50)) / GRID
    assert density(sums, table)[2] == pytest.approx(50, rel=0.05)


def test_at_most_a_share_of_the_terms_above_the_noise_is_noise() -> None:
    """100 of 5,000 terms are real, 40 to 240 records each, with noise of scale 20. The mean share
    of others among the kept is at most the rate, and near it: the bound takes all terms for absent,
    which is 2 % of them. 60 draws; the false-alarm rate is below 1e-4."""
    histogram = VocabularyHistogram(5000, 10, 20.0)
    counts_V = np.zeros(5000, dtype=np.int64)
    counts_V[:100] = np.linspace(40, 240, 100)
    noisy = [histogram(counts_V) for _ in range(60)]
    for rate in (0.1, 0.5):
        kept = [histogram.above_noise(noisy_V, rate) for noisy_V in noisy]
        shares = []
        for seed, (noisy_V, number) in enumerate(zip(noisy, kept, strict=True)):
            ids = histogram.top(noisy_V, number, np.random.default_rng(seed))
            shares.append(float(np.mean(np.array(ids) >= 100)))
        assert 0.6 * rate < np.mean(shares) < 1.15 * rate
        assert np.mean(kept) > 40, "of 100 that are real"


def test_without_a_real_term_few_stand_above_the_noise() -> None:
    histogram = VocabularyHistogram(1000, 10, 20.0)
    nothing_V = np.zeros(1000, dtype=np.int64)
    found = [histogram.above_noise(histogram(nothing_V), 0.1) for _ in range(40)]
    assert sum(number == 0 for number in found) >= 25, "nine of ten are expected to have none"
    assert histogram.above_noise(nothing_V - 5, 0.5) == 0
