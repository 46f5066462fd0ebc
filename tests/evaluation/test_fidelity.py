"""Measures on embeddings: closed forms, known cases, and the order they put sets in."""

import numpy as np
import pytest

from dpray.evaluation.fidelity import (
    compare_fidelity,
    frechet_distance,
    mauve,
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
    assert near["mauve"] > far["mauve"] + 0.1
    assert near["frechet_distance"] < far["frechet_distance"]


def test_mauve_of_equal_far_and_constant_sets():
    x = sample(0.0, 1.0, 400)
    assert mauve(x, x, seed=0) == pytest.approx(1.0, abs=1e-3)
    assert mauve(x + 100.0 * np.eye(3)[0], x + 100.0 * np.eye(3)[1], seed=0) < 0.05
    ones = np.ones((20, 3), dtype=np.float32)
    assert mauve(ones, ones, seed=0) == 1.0


def test_copies_of_one_text_are_compared_in_silence(capfd, recwarn):
    few = sample(0.0, 1.0, 5)
    assert mauve(few.repeat(40, 0), few.repeat(40, 0), seed=0) == pytest.approx(1.0, abs=1e-3)
    assert capfd.readouterr() == ("", "") and not recwarn.list
