from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dpray.accounting.events import DiscreteGaussian
from dpray.mechanisms import votes as vote_histogram
from dpray.mechanisms.votes import GRID, VoteHistogram, count_votes

D = 3
# Coarse values make ties and duplicates; steps of the grid make near-ties float32 cannot see.
coarse = st.sampled_from([-0.5, 0.0, 0.25, 0.5])
nudge = st.sampled_from([0.0, 0.0, 1 / GRID, -1 / GRID, 3e-8])
component = st.builds(lambda a, b: np.float32(a + b), coarse, nudge)
BAD = [math.nan, math.inf, -math.inf, 2.5, 3e38, 1e-30, 0.0]
no_text = st.builds(
    lambda bad, rest, place: np.insert(np.array([rest] * 2, np.float32), place, np.float32(bad)),
    st.sampled_from(BAD), st.sampled_from([0.0, math.nan, 3e38]), st.integers(0, 2),
)  # fmt: skip
"""Embeddings of no text: 0, not finite, too long, or 0 after rounding."""
row = st.one_of(arrays(np.float32, D, elements=component), no_text)


def matrix(rows: list[np.ndarray]) -> np.ndarray:
    return np.array(rows, dtype=np.float32).reshape(len(rows), D)


def by_definition(private: np.ndarray, synthetic: np.ndarray) -> list[int]:
    """Python's integers on the grid; the first of the nearest, and of duplicates. What is no text
    neither votes nor is voted for."""

    def on_grid(rows: np.ndarray) -> list[list[int] | None]:
        found: list[list[int] | None] = []
        for row in rows:
            finite = bool(np.isfinite(row).all())
            whole = [round(float(x) * GRID) for x in row] if finite else []
            is_text = 0 < sum(x * x for x in whole) <= (2 * GRID) ** 2
            found.append(whole if is_text else None)
        return found

    votes = [0] * len(synthetic)
    texts = on_grid(synthetic)
    for x in on_grid(private):
        if x is None or not any(texts):
            continue
        distances = [
            math.inf if y is None else sum((a - b) ** 2 for a, b in zip(x, y, strict=True))
            for y in texts
        ]
        votes[distances.index(min(distances))] += 1
    return votes


rows = st.lists(row, max_size=12)
population = st.lists(row, min_size=1, max_size=8)


@settings(max_examples=100)
@given(rows, population)
def test_votes_are_those_of_the_definition(private, synthetic) -> None:  # type: ignore[no-untyped-def]
    """Which adds up records one by one: each of them moves one count by one, or none."""
    votes = count_votes(matrix(private), matrix(synthetic))
    assert votes.dtype == np.int64
    assert votes.tolist() == by_definition(matrix(private), matrix(synthetic))


def clustered(rng: np.random.Generator, rows: int, dimension: int = 64) -> np.ndarray:
    vectors = np.ones((rows, dimension)) + 1e-5 * rng.standard_normal((rows, dimension))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def test_votes_of_shards_add_up_where_float32_cannot_tell() -> None:
    """All texts are nearly equal, so that every float32 distance is rounding. A search that
    trusts it gives other votes for 5, 19, 20 or 512 rows at a time (FAISS changes its method at
    20); these agree exactly."""
    rng = np.random.default_rng(5)
    private, synthetic = clustered(rng, 700), clustered(rng, 100)
    whole = count_votes(private, synthetic)
    for size in (5, 19, 20, 512):
        parts = [private[i : i + size] for i in range(0, len(private), size)]
        assert (sum(count_votes(part, synthetic) for part in parts) == whole).all()
    assert (count_votes(rng.permutation(private), synthetic) == whole).all()


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(6)
    private, synthetic = clustered(rng, 500), clustered(rng, 40)
    whole = count_votes(private, synthetic)
    monkeypatch.setattr(vote_histogram, "CELLS", 7 * 40)
    monkeypatch.setattr(vote_histogram, "EXACT_CELLS", 100)
    assert (count_votes(private, synthetic) == whole).all()
    assert whole.sum() == 500


def test_votes_of_ordinary_embeddings() -> None:
    rng = np.random.default_rng(7)
    rows = rng.standard_normal((120, 384)).astype(np.float32)
    private, synthetic = np.split(rows / np.linalg.norm(rows, axis=1, keepdims=True), [100])
    distances = ((private[:, None].astype(float) - synthetic[None].astype(float)) ** 2).sum(-1)
    nearest = np.bincount(distances.argmin(1), minlength=20)
    assert count_votes(private, synthetic).tolist() == nearest.tolist()


def test_duplicates_give_the_vote_to_the_first() -> None:
    synthetic = np.array([[0, 1], [1, 0], [1, 0], [-0.0, 1]], dtype=np.float32)
    private = np.array([[0.9, 0.1], [0, 1], [0.1, 0.9]], dtype=np.float32)
    assert count_votes(private, synthetic).tolist() == [2, 1, 0, 0]


def test_shapes_that_do_not_match_are_refused() -> None:
    good = np.eye(2, dtype=np.float32)
    with pytest.raises(ValueError, match="no synthetic text"):
        count_votes(good, good[:0])
    with pytest.raises(ValueError, match="2 components, synthetic ones 3"):
        count_votes(good, np.eye(3, dtype=np.float32))
    with pytest.raises(ValueError, match="two dimensions"):
        count_votes(good[0], good)


def test_what_is_no_text_neither_votes_nor_wins_votes() -> None:
    """The vector 0 would be the nearest one to a record that is far from every text."""
    private = np.array([[-1, 0], [0, 1], [math.nan, 1], [0, 0]], dtype=np.float32)
    synthetic = np.array([[math.nan, 0], [0, 0], [1, 0], [0, 1], [math.inf, 1]], dtype=np.float32)
    assert count_votes(private, synthetic).tolist() == [0, 0, 0, 2, 0]
    assert count_votes(private, synthetic[:2]).tolist() == [0, 0]
    assert count_votes(private[2:], synthetic).tolist() == [0] * 5


def test_cost_of_k_votes() -> None:
    assert VoteHistogram(7.0, 3).dp_event == DiscreteGaussian(7.0, 3)
    one, three = (VoteHistogram(7.0, k).dp_event.zcdp_rho() for k in (1, 3))
    assert three == pytest.approx(9 * one)
    for sigma, k in ((0.0, 1), (-1.0, 1), (math.inf, 1), (math.nan, 1), (1.0, 0)):
        with pytest.raises(ValueError):
            VoteHistogram(sigma, k)
