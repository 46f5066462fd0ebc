"""DP-SGD in one process with plain torch: the measure that training on ranks is held against."""

from __future__ import annotations

import torch

from dpray.methods.dp_sgd.algorithm import DpSgd
from dpray.training.clipped_loss import MicroBatch, PerExampleLoss
from dpray.training.gradient_noise import GradientNoise
from dpray.training.model import trainable_parameters
from dpray.training.optimizer import (
    add_noise_before_steps,
    make_optimizer,
    set_learning_rate,
)
from dpray.training.state import MOMENTS, TrainingState, empty_moments


class ReferenceTrainer:
    """A `Trainer` of one process. `noise_key` is a `new_key()` of this attempt alone."""

    rank = 0
    ranks = 1

    def __init__(
        self, plan: DpSgd, loss: PerExampleLoss, noise_key: str, device: str = "cpu"
    ) -> None:
        self._plan = plan
        self._device = torch.device(device)
        self._loss = loss.to(self._device)
        self._optimizer = make_optimizer(plan, loss)
        add_noise_before_steps(self._optimizer, GradientNoise(plan.mechanism, noise_key))

    def accumulate(self, micro_batch: MicroBatch, last: bool) -> None:
        mechanism = self._plan.mechanism
        clipped = self._loss.clipped(micro_batch.to(self._device), mechanism.clip_to)
        (clipped / mechanism.expected_batch_size).backward()

    def step(self, learning_rate: float) -> None:
        set_learning_rate(self._optimizer, learning_rate)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        """The trained weights by name, on the CPU."""
        named = trainable_parameters(self._loss)
        return {name: p.detach().cpu() for name, p in named.items()}

    def state(self, steps: int) -> TrainingState:
        """After `steps` steps, one of them by this trainer."""
        kinds = MOMENTS if self._plan.optimizer == "adamw" else ()
        named = trainable_parameters(self._loss)
        moments = {
            kind: {name: self._optimizer.state[p][kind].cpu() for name, p in named.items()}
            for kind in kinds
        }
        return TrainingState(steps, self.weights(), moments)

    def restore(self, state: TrainingState) -> None:
        """The optimizer's moments; the weights are in the model already."""
        if not state.moments:
            return
        named = trainable_parameters(self._loss)
        empty_moments(self._optimizer, named.values(), state.steps)
        for kind, moments in state.moments.items():
            for name, parameter in named.items():
                self._optimizer.state[parameter][kind].copy_(moments[name])
