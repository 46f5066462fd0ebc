"""An optimizer that adds the noise itself, right before its step.

The hook sees what the optimizer is about to use: whole parameters, or, under ZeRO, this rank's
partition of them. Each coordinate is in one optimizer's groups once, so it gets its noise once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import SGD, AdamW, Optimizer

from dpray.methods.dp_sgd.algorithm import DpSgd
from dpray.training.clipped_loss import PerExampleLoss
from dpray.training.gradient_noise import GradientNoise
from dpray.training.model import trainable_parameters


def make_optimizer(plan: DpSgd, loss: PerExampleLoss) -> Optimizer:
    """The plan's optimizer of the trainable parameters. Raises ValueError where the model computes
    in another precision than the plan clips for: its gradients could be longer than C."""
    if loss.precision != plan.mechanism.precision:
        raise ValueError(f"a model in {loss.precision}, a plan for {plan.mechanism.precision}")
    kinds: dict[str, type[Optimizer]] = {"adamw": AdamW, "sgd": SGD}
    settings: dict[str, Any] = {"lr": plan.learning_rate, "weight_decay": plan.weight_decay}
    return kinds[plan.optimizer](list(trainable_parameters(loss).values()), **settings)


def add_noise_before_steps(optimizer: Optimizer, noise: GradientNoise) -> None:
    """Every step of `optimizer` from now on is on noisy gradients."""

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
