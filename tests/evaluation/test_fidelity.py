"""Measures on embeddings: closed forms, known cases, and the order they put sets in."""

import numpy as np
import pytest

from dpray.evaluation.fidelity import (
    MAP_POINTS,
    NEIGHBOURS,
    cluster_divergences,
    compare_fidelity,
    embedding_map,
    frechet_distance,
    precision_recall,
)


def sample(mean, scale, size=4000, seed=0):
    return np.random.default_rng(seed).normal(mean, scale, (size, 3))


def test_it_is_zero_for_one_set_and_symmetric():
    x, y = sample(0.0, 1.0), sample(0.5, 2.0, seed=1)
    assert frechet_distance(x, x) == pytest.approx(0.0, abs=1e-9)
    assert frechet_distance(x, y) == pytest.approx(frechet_distance(y, x), rel=1e-9)


def test_it_is_the_closed_form_of_independent_gaussians():
    """D (m^2 + (s - t)^2) for D independent coordinates."""
    found = frechet_distance(sample(0.0, 1.0), sample(0.5, 2.0, seed=1))
    assert found == pytest.approx(3 * (0.25 + 1.0), rel=0.05)


def test_fewer_records_than_dimensions_are_no_obstacle():
    assert np.isfinite(frechet_distance(sample(0, 1, 2), sample(0, 1, 2, seed=2)))


def test_all_measures_are_taken_between_equally_many_records():
    real, synthetic = sample(0.0, 1.0, 900), sample(0.0, 1.0, 60, seed=3)
    result = compare_fidelity(synthetic, real[:450], real[450:], seeds=5)

    assert result["records_a_side"] == result["records_a_draw"] == 60
    for measure in result["measures"].values():
        near, other = measure["synthetic_to_real"]["mean"], measure["real_to_real"]["mean"]
        assert near == pytest.approx(other, rel=0.8)
        assert measure["real_to_real"]["deviation"] > 0


def test_every_measure_ranks_a_near_set_before_a_far_one():
    real = sample(0.0, 1.0, 600)
    sets = {far: (sample(far, 1.0, 300, seed=3), real[:300], real[300:]) for far in (0.0, 1.0)}
    near, far = (
        {name: values["synthetic_to_real"]["mean"] for name, values in found["measures"].items()}
        for found in (compare_fidelity(*s, seeds=2) for s in sets.values())
    )
    for measure in ("precision", "recall", "f1", "mauve"):
        assert near[measure] > far[measure] + 0.1
    for measure in ("frechet_distance", "kl", "total_variation"):
        assert near[measure] < far[measure]


def test_cluster_divergences_of_equal_far_and_constant_sets():
    x = sample(0.0, 1.0, 400)
    equal = cluster_divergences(x, x, seed=0)
    assert equal == {"mauve": pytest.approx(1.0, abs=1e-3), "kl": 0.0, "total_variation": 0.0}

    apart = cluster_divergences(x + 100.0 * np.eye(3)[0], x + 100.0 * np.eye(3)[1], seed=0)
    assert apart["mauve"] < 0.05 and apart["total_variation"] == 1.0 and apart["kl"] > 2
    ones = np.ones((20, 3), dtype=np.float32)
    assert cluster_divergences(ones, ones, seed=0)["mauve"] == 1.0
    half = cluster_divergences(np.vstack([x[:200], x[:200] + 50.0]), x[:200].repeat(2, 0), seed=0)
    assert half["total_variation"] == pytest.approx(0.5, abs=0.1)


def test_copies_of_one_text_are_compared_in_silence(capfd, recwarn):
    few = sample(0.0, 1.0, 5)
    found = cluster_divergences(few.repeat(40, 0), few.repeat(40, 0), seed=0)
    assert found == {"mauve": pytest.approx(1.0, abs=1e-3), "kl": 0.0, "total_variation": 0.0}
    assert capfd.readouterr() == ("", "") and not recwarn.list


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
    found = embedding_map(np.ones((9, 4)), np.ones((MAP_POINTS + 50, 4)))
    assert len(found["synthetic"]) == len(found["real"]) == 9
    assert found["explained"] == [0.0, 0.0] and found["real"][0] == [0.0, 0.0]
    assert embedding_map(np.eye(500), np.eye(500)) == embedding_map(np.eye(500), np.eye(500))
    assert len(embedding_map(np.eye(500), np.eye(500))["real"]) == MAP_POINTS


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
