"""The Fréchet distance against its closed form."""

import numpy as np
import pytest

from dpray.evaluation.fidelity import compare_fidelity, frechet_distance


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
    with pytest.raises(ValueError, match="two records"):
        frechet_distance(sample(0, 1, 1), sample(0, 1, 5))


def test_both_distances_are_taken_between_equally_many_records():
    real = sample(0.0, 1.0, 900)
    result = compare_fidelity(sample(0.0, 1.0, 60, seed=3), real[:450], real[450:], seeds=5)
    assert result["records_a_side"] == 60
    near, other = result["synthetic_to_real"]["mean"], result["real_to_real"]["mean"]
    assert near == pytest.approx(other, rel=0.8)
