"""The optimizer adds DP-SGD's noise itself, right before its step.

Its hook sees what the optimizer is about to use: whole parameters, or, under ZeRO, this rank's
partition of them. Each coordinate is in one optimizer's groups once, so it gets its noise once.

Floating-point caveat: normals are drawn in float64 and rounded to float32, and the clipped sum is
a float32 sum; the sampler is not the exact one of the theory.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.optim import SGD, AdamW, Optimizer

from dpray.config.training import TrainingSettings
from dpray.mechanisms.randomness import generator
from dpray.training.clipped_loss import PerExampleLoss
from dpray.training.step import DpSgdStep

BLOCK = 1 << 20
"""So many normals are held at once: 8 MiB."""


class GradientNoise:
    """Adds a step's noise to gradients that are already divided by B.

    Claim: every coordinate that `add_` is given gets one normal of standard deviation
    `step.noise_std`, independent of all others. The caller hands over every coordinate once a
    step: a rank that alone holds a partition has a key of its own; ranks that hold the same
    coordinates share one key and hand them over in the same order, so that they draw the same.

    It cannot be pickled or copied: a state that was stored could draw the same noise again for
    another gradient, and the difference of the two would be in the open.
    Proof: docs/privacy.md, section 5.3.
    """

    def __init__(self, step: DpSgdStep, key: str) -> None:
        self.step = step
        self.coordinates = 0
        """Counts the coordinates that have their noise, so that a step that skipped some is
        detected."""
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

    def __reduce__(self) -> NoReturn:
        raise TypeError("the state of a noise generator is never stored")


def make_optimizer(settings: TrainingSettings, loss: PerExampleLoss) -> Optimizer:
    """Return the optimizer of the trainable parameters."""
    kinds: dict[str, type[Optimizer]] = {"adamw": AdamW, "sgd": SGD}
    options: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    return kinds[settings.optimizer](list(loss.trainable_parameters().values()), **options)


def add_noise_before_steps(optimizer: Optimizer, noise: GradientNoise) -> None:
    """Make `optimizer` add the noise before each of its steps from now on."""

    def add_noise(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:  # no micro-batch reached it
                    parameter.grad = torch.zeros_like(parameter)
                noise.add_(parameter.grad)

    optimizer.register_step_pre_hook(add_noise)


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
