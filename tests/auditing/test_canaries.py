"""Canaries: rank and exposure by hand; secrets that differ."""

from __future__ import annotations

import math

import pytest

from dpray.auditing.canaries import (
    KINDS,
    REPETITIONS,
    look_alikes,
    make_canaries,
    ranked,
)
from dpray.mechanisms.randomness import generator, new_key


@pytest.mark.parametrize(("loss", "rank"), [(0.5, 1.0), (2.5, 3.0), (3.0, 4.0), (9.0, 6.0)])
def test_rank_counts_those_of_lower_loss_and_ties_by_half(loss: float, rank: float) -> None:
    found = ranked([loss, 1.0, 2.0, 3.0, 3.0, 5.0])
    assert found == {"rank": rank, "candidates": 6, "exposure": math.log2(6 / rank)}


def test_one_of_every_kind_for_each_number_of_repetitions() -> None:
    canaries = make_canaries()
    assert [c.repetitions for c in canaries] == [n for n in REPETITIONS for _ in KINDS]
    assert len({c.secret for c in canaries}) == len(canaries)
    assert all(c.text.count(c.secret) == 1 for c in canaries)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_look_alikes_differ_from_the_canary_in_the_secret_only(kind: object) -> None:
    rng = generator(new_key())
    canary = next(c for c in make_canaries() if c.kind is kind)
    texts = look_alikes(canary, 2000, rng)
    before, after = canary.kind.sentence.split("{}")
    assert len(set(texts)) == 2000 and canary.text not in texts
    assert all(text.startswith(before) and text.endswith(after) for text in texts)
