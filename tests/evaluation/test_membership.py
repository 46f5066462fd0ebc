"""Membership inference: the arithmetic by hand and by simulation, the extremes by texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from dpray.evaluation.membership import attack, auc_standard_error, membership
from dpray.types import InputError
from tests.methods.aug_pe.test_release import BagOfWords


def pair_shares(members: Sequence[float], others: Sequence[float]) -> np.ndarray:
    """Return 1 for each pair whose member is above the other, 1/2 for a tie, and else 0."""
    pairs = [(m > o) + (m == o) / 2 for m, o in product(members, others)]
    return np.array(pairs, dtype=float).reshape(len(members), len(others))


@pytest.mark.parametrize(
    ("members", "others"),
    [([1.0, 2.0, 3.0, 3.0], [0.0, 2.0, 3.0]), ([0.0, 5.0, 1.0], [1.0, 1.0, 4.0, 9.0])],
)
def test_area_and_its_error_are_those_of_the_pairs(
    members: list[float], others: list[float]
) -> None:
    shares = pair_shares(members, others)
    error = math.sqrt(
        shares.mean(1).var(ddof=1) / len(members) + shares.mean(0).var(ddof=1) / len(others)
    )
    assert attack(np.array(members), np.array(others), 0.95)["auc"] == pytest.approx(shares.mean())
    assert auc_standard_error(np.array(members), np.array(others)) == pytest.approx(error)


def test_the_interval_holds_the_area_as_often_as_stated() -> None:
    """Normal scores one deviation apart: the area is Phi(1 / sqrt 2). 400 intervals at 90 %: fewer
    than 335 or more than 380 that hold it have probability 0.1 %, half a point of error allowed."""
    rng = np.random.default_rng(2)
    true = 0.5 * (1 + math.erf(0.5))
    held = 0
    for _ in range(400):
        low, high = attack(rng.normal(1, 1, 120), rng.normal(0, 1, 150), 0.9)["auc_interval"]
        held += low <= true <= high
    assert 335 <= held <= 380


@pytest.mark.parametrize(
    ("members", "others", "area"),
    [(np.ones(100), np.zeros(120), 1.0), (np.zeros(120), np.ones(100), 0.0),
     (np.zeros(100), np.zeros(100), 0.5)],
)  # fmt: skip
def test_without_an_error_the_interval_is_distribution_free(
    members: np.ndarray, others: np.ndarray, area: float
) -> None:
    """By hand, of 100 records at 95 %: sqrt(log(40) / 200) = 0.1358."""
    found = attack(members, others, 0.95)
    assert auc_standard_error(members, others) == 0
    assert found["auc"] == area
    expected = [max(0.0, area - 0.1358), min(1.0, area + 0.1358)]
    assert found["auc_interval"] == pytest.approx(expected, abs=1e-4)


def test_found_at_one_percent_false() -> None:
    """One of 100 others lies above all but three of the members."""
    others = np.append(np.zeros(99), 5.0)
    members = np.append(np.ones(97), [6.0, 6.0, 6.0])
    assert attack(members, others, 0.95)["true_positive_rate"] == 1.0
    others[:2] = 5.0
    assert attack(members, others, 0.95)["true_positive_rate"] == 0.03


def texts(number: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    words = [f"w{i}" for i in range(400)]
    return [" ".join(rng.choice(words, 12)) for _ in range(number)]


def test_copies_are_found_and_unrelated_texts_are_not() -> None:
    members, others = texts(120, 1), texts(110, 2)
    copied = membership(members, others, members, BagOfWords("-"))
    chance = membership(members, others, texts(120, 3), BagOfWords("-"))
    assert copied["private"].startswith("computed from private data")
    for name in ("nearest_cosine", "ngram_overlap"):
        assert copied["scores"][name]["auc"] > 0.99
        assert copied["scores"][name]["true_positive_rate"] == 1.0
    low, high = chance["scores"]["nearest_cosine"]["auc_interval"]
    assert 0.3 < low < high < 0.7


def test_too_few_records_are_refused() -> None:
    embedder = BagOfWords("-")
    with pytest.raises(InputError, match=r"^non-members: too few records, it takes 100$"):
        membership(texts(100, 1), texts(99, 2), ["a"], embedder)
    with pytest.raises(InputError, match="synthetic records: there are none"):
        membership(texts(100, 1), texts(100, 2), [], embedder)
