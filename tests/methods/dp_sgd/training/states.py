"""Whole states of a trainer, as small models have them."""

from __future__ import annotations

import torch

from dpray.methods.dp_sgd.training.journal import TrainingState
from dpray.methods.dp_sgd.training.training import ReferenceTrainer


def state_of(trainer: ReferenceTrainer, steps: int) -> TrainingState:
    """Return the state after so many steps; called on every rank."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in trainer.tensors():
        kind, _, name = key.partition("/")
        found.setdefault(kind, {})[name] = tensor.clone()
    return TrainingState(steps, found.pop("weights"), found)


def weights_of(trainer: ReferenceTrainer) -> dict[str, torch.Tensor]:
    """Return the weights; called on every rank, before the first step too."""
    # The names first: one more tensor would be a moment.
    pairs = zip(trainer._trained, trainer.tensors(), strict=False)
    return {key.partition("/")[2]: tensor.clone() for _, (key, tensor) in pairs}
