"""The claims of docs/privacy.md, section 1.4."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpray.mechanisms.batches import HashPartition, content_id
from dpray.mechanisms.randomness import new_salt

PARTITION = HashPartition.expected(1000, {"a": 0.75, "b": 0.25}, 10, new_salt())


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
