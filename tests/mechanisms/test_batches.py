"""Batches, disjoint (docs/privacy.md, section 1.4) and secret: who joins, what it depends on, and
what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpray.accounting.accountant import cost
from dpray.accounting.composed_events import Parallel, SelfComposed
from dpray.accounting.events import ExponentialMechanism, PoissonSubsampledDraws
from dpray.mechanisms.batches import HashPartition, PoissonBatches, content_id
from dpray.mechanisms.randomness import new_key, new_salt

PARTITION = HashPartition.expected(1000, {"a": 0.75, "b": 0.25}, 10, new_salt())
KEY = "ab" * 32
DRAW = ExponentialMechanism(0.1)


def test_counts_come_from_public_numbers() -> None:
    assert PARTITION.batches_per_label == {"a": 75, "b": 25}
    assert HashPartition.expected(3, {"a": 1.0}, 10, "00").batches_per_label == {"a": 1}


@given(st.lists(st.text(), unique=True, max_size=20), st.text())
def test_a_units_batch_does_not_depend_on_the_others(units: list[str], new: str) -> None:
    before = {unit: next(PARTITION.joined("a", unit)) for unit in units}
    after = {unit: next(PARTITION.joined("a", unit)) for unit in [new, *reversed(units)]}
    assert all(after[unit] == batch for unit, batch in before.items())


def test_batches_fill_evenly() -> None:
    counts = Counter(next(PARTITION.joined("a", f"unit {n}")) for n in range(30_000))
    assert set(counts) == {f"0/{number}" for number in range(75)}
    assert stats.chisquare(list(counts.values())).pvalue > 1e-6


def test_another_salt_is_another_partition() -> None:
    other = HashPartition(PARTITION.batches_per_label, new_salt())
    units = [f"unit {n}" for n in range(200)]
    same = sum(next(PARTITION.joined("a", u)) == next(other.joined("a", u)) for u in units)
    assert same < 40


def test_names() -> None:
    ids = list(PARTITION.batch_ids())
    assert len(ids) == len(set(ids)) == PARTITION.num_batches == 100
    assert ids[:4] == ["0/0", "0/1", "1/0", "0/2"]  # three of four batches are of a
    assert {PARTITION.label_of(i) for i in ids if i.startswith("1/")} == {"b"}


def test_content_ids_tell_label_from_text() -> None:
    assert content_id("bc", "a") != content_id("c", "ab") != content_id("c", None)
    assert content_id("c", "a") == content_id("c", "a")
    assert content_id("\ud800", "a")


def batches(counts: Mapping[str, int], q: Mapping[str, float]) -> PoissonBatches:
    return PoissonBatches(counts, q)


def numbers(made: PoissonBatches, place: str, key: str = KEY, label: str = "a") -> list[int]:
    return [int(batch.split("/")[1]) for batch in made.joined(key, label, place)]


@pytest.mark.parametrize("q", [0.003, 0.1, 0.7])
def test_every_unit_joins_every_batch_with_the_probability_that_is_charged(q: float) -> None:
    count, units = 500, 800
    made = batches({"a": count}, {"a": q})
    joined = np.zeros((units, count), dtype=bool)
    for unit in range(units):
        joined[unit, numbers(made, f"{unit} file")] = True
    total = units * count
    assert stats.binomtest(int(joined.sum()), total, q).pvalue > 1e-4
    # Across units, across batches, and from one batch to the next.
    for sums, n in ((joined.sum(axis=0), units), (joined.sum(axis=1), count)):
        dispersion = ((sums - n * q) ** 2 / (n * q * (1 - q))).sum()
        assert 1e-4 < stats.chi2.cdf(dispersion, len(sums)) < 1 - 1e-4
    pairs = int((joined[:, 1:] & joined[:, :-1]).sum())
    assert stats.binomtest(pairs, units * (count - 1), q * q).pvalue > 1e-4
    # The first and the last batch are as good as any.
    for batch in (0, count - 1):
        assert stats.binomtest(int(joined[:, batch].sum()), units, q).pvalue > 1e-4


def test_coins_are_a_function_of_key_label_and_place() -> None:
    made = batches({"a": 400, "b": 400}, {"a": 0.1, "b": 0.1})
    first = numbers(made, "0 file")
    assert first == numbers(made, "0 file") and sorted(set(first)) == first
    assert first != numbers(made, "1 file")
    assert first != numbers(made, "0 file", new_key())
    assert first != numbers(made, "0 file", label="b")
    # A label and a place never run together to another label and place.
    longer = batches({"a": 400, "a0": 400}, {"a": 0.1, "a0": 0.1})
    assert numbers(longer, "0 x", label="a") != numbers(longer, " x", label="a0")


def test_a_label_with_fewer_units_than_a_batch_has_all_of_them_in_every_batch() -> None:
    made = PoissonBatches.expected(40, {"a": 0.5, "b": 0.5}, 50, 20)
    assert made.sampling_probabilities == {"a": 1.0, "b": 1.0}
    assert numbers(made, "0 file", label="b") == list(range(10))


def test_a_label_without_a_share_has_no_batch_and_a_rare_one_no_larger_probability() -> None:
    made = PoissonBatches.expected(1000, {"a": 0.7, "b": 0.0, "c": 0.29, "d": 0.01}, 50, 20)
    assert dict(made.batches_per_label) == {"a": 14, "b": 0, "c": 6, "d": 1}
    q = made.sampling_probabilities
    assert q == {"a": 50 / 700, "b": 0.0, "c": 50 / 290, "d": 50 / 290}
    assert numbers(made, "0 file", label="b") == []
    assert [made.label_of(batch) for batch in made.batch_ids()].count("b") == 0
    kept = {label: made.batches_per_label[label] for label in "acd"}
    without = PoissonBatches(kept, {label: q[label] for label in "acd"})
    for rows in (1, 3):
        assert made.dp_event(DRAW, 8, rows) == without.dp_event(DRAW, 8, rows)


def test_the_batches_of_labels_are_charged_in_parallel_for_units_of_one_row() -> None:
    made = batches({"a": 30, "b": 31}, {"a": 0.1, "b": 0.1})
    text = PoissonSubsampledDraws(0.1, 0.1, 8)
    assert made.dp_event(DRAW, 8, 1) == SelfComposed(text, 31)
    other = batches({"a": 30, "b": 5}, {"a": 0.1, "b": 0.4})
    event = other.dp_event(DRAW, 8, 1)
    assert isinstance(event, Parallel)
    alone = [cost(part, 1e-6).epsilon for part in event.events]
    assert max(alone) <= cost(event, 1e-6).epsilon < max(alone) * 1.01


def test_units_of_several_rows_are_charged_for_the_batches_of_all_their_labels() -> None:
    made = batches({"a": 30, "b": 30, "c": 30}, {"a": 0.1, "b": 0.1, "c": 0.1})
    two = ExponentialMechanism(0.2)  # of a unit with both rows in one label
    charged = cost(made.dp_event(two, 8, 2), 1e-6).epsilon
    together = cost(SelfComposed(PoissonSubsampledDraws(0.1, 0.2, 8), 30), 1e-6).epsilon
    apart = cost(SelfComposed(PoissonSubsampledDraws(0.1, 0.1, 8), 60), 1e-6).epsilon
    assert charged >= max(together, apart) * (1 - 1e-9)
    assert charged < max(together, apart) * 1.01
    one_label = batches({"a": 30}, {"a": 0.1})
    assert cost(one_label.dp_event(two, 8, 2), 1e-6).epsilon == pytest.approx(together)
