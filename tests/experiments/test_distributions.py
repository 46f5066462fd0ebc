"""The papers' distances of two sets of texts."""

from __future__ import annotations

import numpy as np
import pytest
from paper_evaluation.distributions import compare_distributions, divergences, f1


def blob(number: int, centre: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(centre, 1.0, (number, 4)).astype(np.float32)


def test_precision_sees_odd_texts_and_recall_missing_ones() -> None:
    real = np.concatenate([blob(200, 0, 0), blob(200, 30, 1)])
    like, half, odd = (
        np.concatenate([blob(200, 0, 2), blob(200, 30, 3)]),
        blob(400, 0, 4),
        np.concatenate([blob(200, 0, 5), blob(200, -60, 6)]),
    )
    assert min(f1(like, real).values()) > 0.85
    one_kind, strange = f1(half, real), f1(odd, real)
    assert one_kind["precision"] > 0.85 and one_kind["recall"] == pytest.approx(0.5, abs=0.05)
    assert strange["precision"] == pytest.approx(0.5, abs=0.05)
    assert f1(blob(50, -60, 7), real) == {"precision": 0.0, "recall": 0.0, "f1": 0.0}


def test_divergences_of_counts() -> None:
    assert divergences([0, 1, 1], [0, 1, 1]) == {"kl": 0.0, "tv": 0.0}
    found = divergences([0, 0], [1, 1])  # with one more of each: 3/4, 1/4 against 1/4, 3/4
    assert found["tv"] == pytest.approx(0.5)
    assert found["kl"] == pytest.approx(0.5 * np.log(3))


def test_all_distances_are_least_for_texts_of_the_same_kind() -> None:
    texts = [" ".join(["word"] * (4 + n % 20)) for n in range(300)]
    real = np.concatenate([blob(150, 0, 0), blob(150, 30, 1)])
    near = compare_distributions(texts, texts, real[::-1].copy(), real)
    far = compare_distributions([t * 3 for t in texts], texts, blob(300, 0, 2), real)
    for name in ("lengths", "topics"):
        assert near[name]["kl"] < 1e-12 < far[name]["kl"]
        assert near[name]["tv"] < 1e-12 < far[name]["tv"]
    assert near["neighbours"]["f1"] > 0.99 > far["neighbours"]["f1"]
