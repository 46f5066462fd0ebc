"""The claims of docs/privacy.md, section 1.5, and numbers that are shared out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.mechanisms.labels import LabelHistogram, largest_remainder

LABELS = ("a", "b", "c")
HISTOGRAM = LabelHistogram(LABELS, epsilon=0.5)
label = st.sampled_from(LABELS)


@given(st.lists(label, max_size=30), label, st.integers(0, 30))
def test_a_record_moves_one_count_by_one(records: list[str], new: str, place: int) -> None:
    moved = HISTOGRAM.count([*records[:place], new, *records[place:]]) - HISTOGRAM.count(records)
    assert moved[LABELS.index(new)] == 1 and np.abs(moved).sum() == 1


def test_counts_of_shards_add_up() -> None:
    records = list("abcabca")
    total = HISTOGRAM.count(records[:3]) + HISTOGRAM.count(iter(records[3:]))
    assert total.tolist() == HISTOGRAM.count(records).tolist() == [3, 2, 2]


def test_a_record_of_an_unknown_label_counts_nowhere() -> None:
    assert HISTOGRAM.count(["a", "secret", ""]).tolist() == HISTOGRAM.count(["a"]).tolist()


@given(st.floats(1e-6, 1e3), st.integers(1, 1000))
def test_the_cost_is_epsilon_and_never_more(epsilon: float, k: int) -> None:
    histogram = LabelHistogram(LABELS, epsilon, k)
    event = histogram.dp_event
    assert event.sensitivity == k and event.scale == histogram.scale
    assert event.pure_epsilon() <= epsilon
    assert event.pure_epsilon() == pytest.approx(epsilon, rel=1e-12)


@given(st.lists(st.integers(-(2**62), 2**62), min_size=3, max_size=3))
def test_proportions_sum_to_one(noisy: list[int]) -> None:
    shares = HISTOGRAM.proportions(np.array(noisy, dtype=np.int64))
    assert tuple(shares) == LABELS
    assert abs(math.fsum(shares.values()) - 1) < 1e-9
    assert all(share >= 0 for share in shares.values())


def test_proportions_are_cut_at_zero_and_uniform_without_counts() -> None:
    assert HISTOGRAM.proportions(np.array([3, -8, 1])) == {"a": 0.75, "b": 0.0, "c": 0.25}
    assert set(HISTOGRAM.proportions(np.array([0, -8, -1])).values()) == {1 / 3}


@pytest.mark.parametrize(
    ("labels", "epsilon", "k"),
    [
        ((), 1.0, 1),
        (("a", "a"), 1.0, 1),
        (LABELS, 0.0, 1),
        (LABELS, -1.0, 1),
        (LABELS, math.inf, 1),
        (LABELS, math.nan, 1),
        (LABELS, 1.0, 0),
    ],
)
def test_bad_parameters(labels: tuple[str, ...], epsilon: float, k: int) -> None:
    with pytest.raises(ValueError):
        LabelHistogram(labels, epsilon, k)


def test_largest_remainder() -> None:
    thirds = dict.fromkeys("abc", 1 / 3)
    assert largest_remainder(10, thirds) == {"a": 4, "b": 3, "c": 3}
    assert largest_remainder(10, {"a": 0.05, "b": 0.92, "c": 0.03}) == {"a": 1, "b": 9, "c": 0}
    assert largest_remainder(7, {"": 1.0}) == {"": 7}
    rng = np.random.default_rng(0)
    for _ in range(300):
        shares = rng.dirichlet(np.ones(rng.integers(1, 30)) / 3)
        records = int(rng.integers(1, 5000))
        split = largest_remainder(records, {str(i): p for i, p in enumerate(shares)})
        assert sum(split.values()) == records
        assert max(abs(split[str(i)] - p * records) for i, p in enumerate(shares)) < 1
