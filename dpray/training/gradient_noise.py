"""DP-SGD's noise is added to what the optimizer is about to use.

These are whole parameters, or, under ZeRO, this rank's partition of them. Each coordinate is in one
optimizer's groups once, so it gets its noise once.

Floating-point caveat: normals are drawn in float64 and rounded to float32, and the clipped sum is
a float32 sum; the sampler is not the exact one of the theory.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.optim import SGD, AdamW, Optimizer

from dpray.mechanisms.randomness import generator
from dpray.training.clipped_loss import PerExampleLoss
from dpray.training.settings import TrainingSettings
from dpray.training.step import DpSgdStep
from dpray.types import DprayError

BLOCK = 1 << 20
"""The number of normals that are drawn at once: 8 MiB."""


class GradientNoise:
    """Adds a step's noise to gradients that are already divided by B.

    Claim: every coordinate that `add_` is given gets one normal of standard deviation
    `step.noise_std`, independent of all others. The caller hands over every coordinate once a
    step, and calls `check` at its end. A rank that alone holds a partition has a key of its own.
    Ranks that hold the same coordinates share one key and hand them over in the same order, so that
    they draw the same noise.

    It cannot be pickled or copied: a state that was stored could draw the same noise again for
    another gradient, and the difference of the two would be in the open.
    Proof: docs/privacy.md, section 5.3.
    """

    def __init__(self, step: DpSgdStep, key: str) -> None:
        self.step = step
        self.coordinates = 0
        """The number of coordinates that have this step's noise. `check` sets it back to 0."""
        self._rng = generator(key)

    def add_(self, gradient: torch.Tensor) -> None:
        """Add noise in place, blockwise; `gradient` is contiguous and float32."""
        if gradient.dtype != torch.float32:
            raise TypeError(f"noise is added in float32, the gradient is {gradient.dtype}")
        flat = gradient.detach().view(-1)
        self.coordinates += flat.numel()
        for start in range(0, flat.numel(), BLOCK):
            part = flat[start : start + BLOCK]
            normals = self._rng.standard_normal(part.numel())
            normals *= self.step.noise_std
            part += torch.from_numpy(normals).float().to(part.device)

    def check(self, coordinates: int) -> None:
        """End a step. Raises DprayError if fewer coordinates than these have their noise."""
        noisy, self.coordinates = self.coordinates, 0
        if noisy < coordinates:
            raise DprayError("the training made a step without noise; the run stops")

    def __reduce__(self) -> NoReturn:
        raise TypeError("the state of a noise generator is never stored")


def make_optimizer(settings: TrainingSettings, loss: PerExampleLoss) -> Optimizer:
    """Return the optimizer of the trainable parameters."""
    kinds: dict[str, type[Optimizer]] = {"adamw": AdamW, "sgd": SGD}
    options: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    return kinds[settings.optimizer](list(loss.trainable_parameters().values()), **options)


def add_noise(optimizer: Optimizer, noise: GradientNoise) -> None:
    """Add the noise to every gradient that the optimizer's next step uses."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:  # no micro-batch reached it
                parameter.grad = torch.zeros_like(parameter)
            noise.add_(parameter.grad)


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
