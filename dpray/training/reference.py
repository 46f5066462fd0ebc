"""`ReferenceTrainer` makes DP-SGD's steps in one process with plain torch; training on ranks is
tested against it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dpray.config.training import TrainingSettings
from dpray.mechanisms.randomness import generator, new_key
from dpray.training.batches import TrainingText
from dpray.training.clipped_loss import MicroBatch, PerExampleLoss
from dpray.training.gradient_noise import (
    GradientNoise,
    add_noise_before_steps,
    make_optimizer,
    set_learning_rate,
)
from dpray.training.state import MOMENTS, TrainingState, empty_moments
from dpray.training.step import DpSgdStep
from dpray.training.training import OnStep, Training, train


class ReferenceTrainer:
    """Trains in one process. `noise_key` is a `new_key()` of this attempt alone."""

    rank = 0
    ranks = 1

    def __init__(
        self,
        step: DpSgdStep,
        settings: TrainingSettings,
        loss: PerExampleLoss,
        noise_key: str,
        device: str = "cpu",
    ) -> None:
        self._step, self._device = step, torch.device(device)
        self._loss = loss.to(self._device)
        self._optimizer = make_optimizer(step, settings, loss)
        self._moments = MOMENTS[settings.optimizer]
        add_noise_before_steps(self._optimizer, GradientNoise(step, noise_key))

    def accumulate(self, texts: Sequence[TrainingText], shape: tuple[int, int], last: bool) -> None:
        micro_batch = MicroBatch.of(texts, *shape).to(self._device)
        clipped = self._loss.clipped(micro_batch, self._step.clip_to)
        (clipped / self._step.expected_batch_size).backward()

    def step(self, learning_rate: float) -> None:
        set_learning_rate(self._optimizer, learning_rate)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        named = self._loss.trainable_parameters()
        return {name: p.detach().cpu() for name, p in named.items()}

    def state(self, steps: int) -> TrainingState:
        named = self._loss.trainable_parameters()
        moments = {
            kind: {name: self._optimizer.state[p][kind].cpu() for name, p in named.items()}
            for kind in self._moments
        }
        return TrainingState(steps, self.weights(), moments)

    def restore(self, state: TrainingState) -> None:
        if not state.moments:
            return
        named = self._loss.trainable_parameters()
        empty_moments(self._optimizer, named.values(), state.steps)
        for kind, moments in state.moments.items():
            for name, parameter in named.items():
                self._optimizer.state[parameter][kind].copy_(moments[name])


def train_here(training: Training, on_step: OnStep) -> None:
    """Train in this process, on its GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def make_trainer(loss: PerExampleLoss) -> ReferenceTrainer:
        return ReferenceTrainer(training.step, training.settings, loss, new_key(), device)

    train(training, make_trainer, generator(new_key()), on_step)
    if device == "cuda":
        torch.cuda.empty_cache()  # the engine that writes the texts may want all of it
