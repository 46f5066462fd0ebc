"""The embeddings' map."""

import numpy as np
import pytest

from dpray.evaluation.map import POINTS, embedding_map


def test_the_map_keeps_distances_that_lie_in_a_plane():
    rng = np.random.default_rng(0)
    plane = np.linalg.qr(rng.normal(size=(6, 2)))[0].T
    made, real = rng.normal(size=(30, 2)) @ plane, (rng.normal(size=(30, 2)) + 4) @ plane

    found = embedding_map(made, real)

    points, vectors = np.array(found["synthetic"] + found["real"]), np.vstack([made, real])
    seen, true = (np.linalg.norm(v[:, None] - v[None], axis=2) for v in (points, vectors))
    assert np.sort(seen, axis=None) == pytest.approx(np.sort(true, axis=None), abs=1e-3)
    assert sum(found["explained"]) == pytest.approx(1.0, abs=1e-3)
    assert np.mean(found["real"], axis=0)[0] * np.mean(found["synthetic"], axis=0)[0] < 0


def test_sides_are_equally_many_and_constant_vectors_have_a_map():
    found = embedding_map(np.ones((9, 4)), np.ones((POINTS + 50, 4)))
    assert len(found["synthetic"]) == len(found["real"]) == 9
    assert found["explained"] == [0.0, 0.0] and found["real"][0] == [0.0, 0.0]
    assert embedding_map(np.eye(500), np.eye(500)) == embedding_map(np.eye(500), np.eye(500))
    assert len(embedding_map(np.eye(500), np.eye(500))["real"]) == POINTS
