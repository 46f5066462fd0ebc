"""Canaries: rank and exposure by hand; secrets that differ and are looked for word for word."""

from __future__ import annotations

import numpy as np
import pytest

from dpray.auditing.canaries import (
    KINDS,
    REPETITIONS,
    exposure,
    leaks,
    look_alikes,
    make_canaries,
    rank,
)
from dpray.mechanisms.randomness import generator, new_key


def test_rank_counts_those_of_lower_loss_and_ties_by_half() -> None:
    losses = np.array([1.0, 2.0, 3.0, 3.0, 5.0])
    assert rank(0.5, losses) == 1
    assert rank(2.5, losses) == 3
    assert rank(3.0, losses) == 4
    assert rank(9.0, losses) == 6


def test_exposure_of_the_first_and_the_last_of_1024() -> None:
    assert exposure(1, 1024) == 10 and exposure(1024, 1024) == 0


def test_one_of_every_kind_for_each_number_of_repetitions() -> None:
    canaries = make_canaries(generator(new_key()))
    assert [c.repetitions for c in canaries] == [n for n in REPETITIONS for _ in KINDS]
    assert len({c.secret for c in canaries}) == len(canaries)
    assert all(c.text.count(c.secret) == 1 for c in canaries)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_look_alikes_differ_from_the_canary_in_the_secret_only(kind: object) -> None:
    rng = generator(new_key())
    canary = next(c for c in make_canaries(rng) if c.kind is kind)
    texts = look_alikes(canary, 2000, rng)
    before, after = canary.kind.sentence.split("{}")
    assert len(set(texts)) == 2000 and canary.text not in texts
    assert all(text.startswith(before) and text.endswith(after) for text in texts)


def test_leaks_are_texts_that_hold_the_secret_word_for_word() -> None:
    texts = ["plate ABC 123.", "ABC 123 and ABC 123", "abc 123", "AB C 123", ""]
    assert leaks("ABC 123", texts) == 2
