"""The reference trainer makes single steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dpray.config.training import TrainingSettings
from dpray.mechanisms.randomness import new_key
from dpray.training.clipped_loss import PerExampleLoss
from dpray.training.reference import ReferenceTrainer
from dpray.training.step import DpSgdStep
from tests.training.tiny_gradients import (
    flat,
    gpt2,
    llama,
    lora,
    plain_clipped_sum,
    texts,
    trainable,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread")

C = 0.7
STEP = DpSgdStep(0.3, 1e-9, C, expected_batch_size=6.0)
"""Almost without noise: it is lost in float32 rounding."""


def trainer(loss: PerExampleLoss, sigma: float = 1e-9) -> ReferenceTrainer:
    step, settings = replace(STEP, noise_multiplier=sigma), TrainingSettings(optimizer="sgd")
    return ReferenceTrainer(step, settings, loss, new_key())


def test_an_empty_batch_still_steps_with_noise() -> None:
    loss = PerExampleLoss(gpt2()).eval()
    before = flat(loss.model)
    ours = trainer(loss, sigma=1.0)
    ours.accumulate((), (1, 2), last=True)
    assert all(p.grad is not None and not p.grad.any() for p in trainable(loss.model))
    ours.step(0.1)
    assert (flat(loss.model) != before).float().mean() > 0.99


def test_the_sum_is_divided_by_the_public_size() -> None:
    loss, batch = PerExampleLoss(gpt2()).eval(), texts(3)
    plain = plain_clipped_sum(loss.model, batch, STEP.clip_to) / 6.0
    before = flat(loss.model)
    ours = trainer(loss)
    ours.accumulate(batch, (3, 30), last=True)
    ours.step(1.0)
    torch.testing.assert_close(before - flat(loss.model), plain, rtol=0, atol=1e-6)


def test_a_model_in_another_precision_than_the_steps_is_refused() -> None:
    loss = PerExampleLoss(lora(llama()), "bfloat16").eval()
    with pytest.raises(ValueError, match="bfloat16"):
        trainer(loss)
