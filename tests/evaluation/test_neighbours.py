"""Nearest neighbours in blocks against the same by all pairs."""

import numpy as np
import pytest

from dpray.evaluation.neighbours import NEIGHBOURS, nearest_cosine, precision_recall


def within(x, y):
    """Kynkäänniemi et al. 2019, Eq. 1, word for word."""
    among = np.linalg.norm(y[:, None] - y[None], axis=2)
    radii = np.sort(among, axis=1)[:, NEIGHBOURS]
    return (np.linalg.norm(x[:, None] - y[None], axis=2) <= radii[None]).any(axis=1).mean()


@pytest.mark.parametrize("shift", [0.0, 0.5, 100.0])
def test_precision_and_recall_are_those_by_all_pairs(shift):
    rng = np.random.default_rng(0)
    real = rng.normal(shift, 1.0, (300, 5)).astype(np.float32)
    synthetic = rng.normal(shift + 0.8, 0.5, (150, 5)).astype(np.float32)

    found = precision_recall(synthetic, real)

    precision, recall = within(synthetic, real), within(real, synthetic)
    assert found["precision"] == pytest.approx(precision, abs=0.01)
    assert found["recall"] == pytest.approx(recall, abs=0.01)
    assert 0 < recall < precision < 1
    assert found["f1"] == pytest.approx(2 / (1 / precision + 1 / recall), abs=0.01)


def test_a_set_is_within_itself_copies_included_and_far_sets_are_not():
    x = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
    copies = np.repeat(x, NEIGHBOURS + 2, axis=0)

    assert precision_recall(x, copies)["precision"] == 1.0
    assert precision_recall(copies, copies) == {"precision": 1.0, "recall": 1.0, "f1": 1.0}
    assert precision_recall(x + 100, x) == {"precision": 0.0, "recall": 0.0, "f1": 0.0}
    one = np.repeat(x[:1], 20, axis=0)
    assert precision_recall(one, x) == {
        "precision": 1.0,
        "recall": 0.02,
        "f1": pytest.approx(2 / 51),
    }


def test_nearest_cosine_is_that_by_all_pairs():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 6)), rng.normal(size=(90, 6)) * 7
    y[5] = 0.0
    dots = (
        x @ y.T / np.linalg.norm(x, axis=1)[:, None] / np.maximum(np.linalg.norm(y, axis=1), 1e-9)
    )

    assert nearest_cosine(x, y) == pytest.approx(dots.max(axis=1), abs=1e-6)
    assert nearest_cosine(y[:5], y).max() <= 1.0
