"""The DP-KPS paper's classifier."""

import numpy as np
import pytest
import torch
from paper_evaluation.network import coral, three_layer_network

from dpray.evaluation.downstream import Embedded


def rings(count, seed, shift=0.0):
    """Two classes that no line parts."""
    rng = np.random.default_rng(seed)
    labels = np.array(["inner", "outer"])[np.arange(count) % 2]
    angle = rng.uniform(0, 2 * np.pi, count)
    radius = np.where(labels == "inner", 0.3, 1.0) + rng.normal(0, 0.05, count)
    vectors = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1) + shift
    return Embedded(vectors.astype(np.float32), labels)


def test_it_learns_what_is_not_linear_and_is_the_same_for_one_seed():
    train, test = rings(600, 1, shift=3.0), rings(200, 2, shift=3.0)
    state = torch.random.get_rng_state()

    networks = [three_layer_network(train, seed=seed) for seed in (0, 0, 1)]

    assert (networks[0].predict(test.vectors) == test.labels).mean() > 0.95
    weights = [network.layers[0].weight for network in networks]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert sum(isinstance(layer, torch.nn.Linear) for layer in networks[0].layers) == 3


def test_coral_is_the_distance_of_covariances():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(50, 4)), rng.normal(size=(30, 4)) * 2
    expected = ((np.cov(a.T) - np.cov(b.T)) ** 2).sum() / (4 * 4**2)
    found = coral(torch.from_numpy(a), torch.from_numpy(b))
    assert float(found) == pytest.approx(expected)
