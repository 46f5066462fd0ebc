"""Texts are selected by their noisy counts, by rank or in proportion."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dpray.mechanisms.randomness import generator, new_key
from dpray.methods.aug_pe.algorithm import select_by_probability, select_by_rank
from tests.statistical.two_sided import fits_probabilities

KEY = "1" * 64


def counts(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_the_best_by_rank_come_first() -> None:
    rng = generator(new_key())
    assert select_by_rank(counts(1, 9, -5, 7, 3), 3, rng).tolist() == [1, 3, 4]


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=12), st.data())
def test_rank_takes_no_text_twice_and_no_worse_one(votes: list[int], data: st.DataObject) -> None:
    n = data.draw(st.integers(0, len(votes)))
    kept = select_by_rank(counts(*votes), n, generator(KEY)).tolist()
    assert len(set(kept)) == len(kept) == n
    rest = [max(votes[i], 0) for i in range(len(votes)) if i not in kept]
    assert all(max(votes[i], 0) >= value for i in kept for value in rest)


def test_ties_are_broken_at_random() -> None:
    rng = generator(new_key())
    chosen = Counter(int(select_by_rank(counts(-1, 0, -9, 0), 1, rng)[0]) for _ in range(8000))
    assert fits_probabilities([chosen[i] for i in range(4)], [0.25] * 4)


def test_probability_is_proportional_to_the_cut_counts() -> None:
    drawn = select_by_probability(counts(1, -4, 3, 0, 6), 20_000, generator(new_key()))
    observed = np.bincount(drawn, minlength=5)
    assert observed[1] == observed[3] == 0
    assert fits_probabilities(observed[[0, 2, 4]].tolist(), [0.1, 0.3, 0.6])


def test_no_votes_are_uniform() -> None:
    drawn = select_by_probability(counts(-4, 0, -1), 9000, generator(new_key()))
    assert fits_probabilities(np.bincount(drawn, minlength=3).tolist(), [1 / 3] * 3)


def test_the_generator_decides() -> None:
    votes = counts(0, 2, 2, 2, 5, 0, 0)
    for select in (select_by_rank, select_by_probability):
        assert (select(votes, 4, generator(KEY)) == select(votes, 4, generator(KEY))).all()
