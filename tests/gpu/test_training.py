"""DP-SGD on a GPU makes the host's steps; needs torch and no vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dpray.mechanisms.randomness import generator, new_key
from dpray.methods.dp_sgd.algorithm import DpSgd, fine_tune
from dpray.methods.dp_sgd.training.clipped_loss import PerExampleLoss
from dpray.methods.dp_sgd.training.settings import TrainingSettings
from dpray.methods.dp_sgd.training.step import DpSgdStep
from dpray.methods.dp_sgd.training.training import GradientNoise, ReferenceTrainer
from tests.methods.dp_sgd.training.tiny_gradients import flat, gpt2, llama, lora, texts

pytestmark = pytest.mark.usefixtures("one_thread")

STEP = DpSgdStep(
    sampling_probability=0.3, noise_multiplier=1.0, clip_norm=0.7, expected_batch_size=6.0
)


@pytest.mark.parametrize("make", [gpt2, lambda: lora(llama())], ids=["gpt2", "llama_lora"])
def test_a_training_ends_at_the_weights_that_the_host_has(
    make: Callable[[], Any], device: str
) -> None:
    settings = TrainingSettings(micro_batch_size=4, learning_rate=0.1, optimizer="sgd")
    sampling, noise = new_key(), new_key()

    def tuned(place: str) -> torch.Tensor:
        loss = PerExampleLoss(make()).eval()
        trainer = ReferenceTrainer(STEP, settings, loss, noise, place)
        units = [[text] for text in texts(20)]
        fine_tune(DpSgd(STEP, 3, settings), units, trainer, generator(sampling))
        return flat(loss.model).cpu()

    start, host = flat(make()), tuned("cpu")
    assert (host - start).abs().max() > 0.01
    torch.testing.assert_close(tuned(device), host, rtol=0, atol=2e-5)


def test_noise_is_that_of_its_key_on_every_device(device: str) -> None:
    key, zeros = new_key(), torch.zeros(2, 700_000)
    there = zeros.clone().to(device)
    GradientNoise(STEP, key).add_(there)
    GradientNoise(STEP, key).add_(zeros)
    assert (there.cpu() == zeros).all() and zeros.std() > 0.9 * STEP.noise_std
