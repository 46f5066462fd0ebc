"""What a training that was cut off goes on from: weights and the optimizer's moments, in a form
that knows nothing of ranks.

The states of the noise and of the sampling are no part of it: they are never stored.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.optim import Optimizer

from dpray.io.files import sync
from dpray.training.clipped_loss import PerExampleLoss
from dpray.training.model import trainable_parameters

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's; plain SGD has none."""


@dataclass(frozen=True)
class TrainingState:
    """After `steps` steps. Weights by their `trainable_parameters` names, on the CPU; each of
    MOMENTS by the same names, or nothing."""

    steps: int
    weights: Mapping[str, torch.Tensor] = field(repr=False)
    moments: Mapping[str, Mapping[str, torch.Tensor]] = field(repr=False)

    def save(self, path: Path) -> None:
        """Durably: a file of this name is whole."""
        tensors = {f"weights/{name}": w.contiguous() for name, w in self.weights.items()}
        for kind, of_kind in self.moments.items():
            tensors |= {f"{kind}/{name}": moment.contiguous() for name, moment in of_kind.items()}
        temporary = path.with_suffix(".tmp")
        save_file(tensors, temporary, {"steps": str(self.steps)})
        for place in (temporary, path.parent):
            sync(place)
        os.replace(temporary, path)

    @staticmethod
    def load(path: Path) -> TrainingState:
        found: dict[str, dict[str, torch.Tensor]] = {"weights": {}}
        with safe_open(path, framework="pt") as file:
            steps = int(file.metadata()["steps"])
            for key in file.keys():  # noqa: SIM118 (not a mapping)
                kind, _, name = key.partition("/")
                found.setdefault(kind, {})[name] = file.get_tensor(key)
        return TrainingState(steps, found.pop("weights"), found)

    def put_weights(self, loss: PerExampleLoss) -> None:
        """Into a whole model, before any engine takes it apart."""
        with torch.no_grad():
            for name, parameter in trainable_parameters(loss).items():
                parameter.copy_(self.weights[name])


def empty_moments(optimizer: Optimizer, tensors: Iterable[torch.Tensor], steps: int) -> None:
    """Gives every tensor of AdamW's moments that are 0 after `steps` steps, to be filled in."""
    for tensor in tensors:
        zeros = {kind: torch.zeros_like(tensor, requires_grad=False) for kind in MOMENTS}
        optimizer.state[tensor] = {"step": torch.tensor(float(steps)), **zeros}
