"""DP-SGD's noise where the gradient is zero: right on every coordinate, 2/3 and 3/2 told apart.

False-alarm rate of each test: at most 1e-6.
Proof: docs/privacy.md, section 5.3.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from dpray.mechanisms.randomness import new_key
from dpray.methods.dp_sgd.training.clipped_loss import PerExampleLoss
from dpray.methods.dp_sgd.training.settings import TrainingSettings
from dpray.methods.dp_sgd.training.step import DpSgdStep
from dpray.methods.dp_sgd.training.training import GradientNoise, ReferenceTrainer
from tests.methods.dp_sgd.training.tiny_gradients import gpt2
from tests.statistical.two_sided import ALPHA, WRONG_SCALES, fits_distribution

STEPS = 80


pytestmark = pytest.mark.usefixtures("one_thread")


def step(sigma: float = 1.3) -> DpSgdStep:
    """sigma C / (q N) = 1.3 * 0.5 / 8."""
    return DpSgdStep(
        sampling_probability=0.1, noise_multiplier=sigma, clip_norm=0.5, expected_batch_size=8.0
    )


STD = 1.3 * 0.5 / 8.0


def releases(sigma: float = 1.3) -> np.ndarray:
    """Noisy means of empty batches, one row a step, as the weights of a model moved by them."""
    settings = TrainingSettings(learning_rate=1.0, optimizer="sgd")
    loss = PerExampleLoss(gpt2(width=8)).eval()
    parameters = [p for p in loss.parameters() if p.requires_grad]
    trainer = ReferenceTrainer(step(sigma), settings, loss, new_key())
    rows = []
    for _ in range(STEPS):
        with torch.no_grad():
            for parameter in parameters:
                parameter.zero_()
        trainer.accumulate((), (1, 2), last=True)
        trainer.add_noise()
        trainer.update()
        rows.append(torch.cat([-p.detach().reshape(-1) for p in parameters]).double().numpy())
    return np.stack(rows)


def every_coordinate_fits(rows: np.ndarray, std: float) -> bool:
    """Chi-square of each coordinate over the steps, Bonferroni over coordinates."""
    squares = np.square(rows / std).sum(0)
    p_values = 2 * np.minimum(stats.chi2(STEPS).cdf(squares), stats.chi2(STEPS).sf(squares))
    return bool(p_values.min() > ALPHA / rows.shape[1])


def uncorrelated(first: np.ndarray, second: np.ndarray) -> bool:
    return bool(stats.pearsonr(first.reshape(-1), second.reshape(-1)).pvalue > ALPHA)


@pytest.mark.parametrize("scale", [1.0, *WRONG_SCALES])
def test_the_noise_is_normal_of_the_stated_size_on_every_coordinate(scale: float) -> None:
    rows = releases(1.3 * scale)
    assert (rows != 0).mean() > 0.999
    assert fits_distribution(rows.reshape(-1), stats.norm(scale=STD).cdf) == (scale == 1)
    assert every_coordinate_fits(rows, STD) == (scale == 1)
    assert uncorrelated(rows[:-1], rows[1:])
    assert uncorrelated(rows[:, :-1], rows[:, 1:])


def test_no_two_draws_are_alike() -> None:
    """Partitions have keys of their own, and a generator never repeats itself."""
    one, other = GradientNoise(step(), new_key()), GradientNoise(step(), new_key())
    drawn = []
    for noise in (one, other, one):
        gradient = torch.zeros(20_000)
        noise.add_(gradient)
        drawn.append(gradient.double().numpy())
    assert all(uncorrelated(drawn[i], drawn[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
