"""An interrupted training resumes from a `TrainingState`, whatever the number of ranks.

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

MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ()}
"""Each optimizer keeps these moments; plain SGD keeps none."""


@dataclass(frozen=True)
class TrainingState:
    """Holds, after `steps` steps, the weights by their names in
    `PerExampleLoss.trainable_parameters`, on the CPU, and each of the optimizer's moments by the
    same names."""

    steps: int
    weights: Mapping[str, torch.Tensor] = field(repr=False)
    moments: Mapping[str, Mapping[str, torch.Tensor]] = field(repr=False)

    def save(self, path: Path) -> None:
        """Write the file durably: a file of this name is whole."""
        tensors = {f"weights/{name}": w.contiguous() for name, w in self.weights.items()}
        for kind, named in self.moments.items():
            tensors |= {f"{kind}/{name}": moment.contiguous() for name, moment in named.items()}
        temporary = path.with_suffix(".tmp")
        save_file(tensors, temporary, {"steps": str(self.steps)})
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)

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
        """Copy the weights into a whole model, before any engine takes it apart."""
        with torch.no_grad():
            for name, parameter in loss.trainable_parameters().items():
                parameter.copy_(self.weights[name])


def empty_moments(optimizer: Optimizer, tensors: Iterable[torch.Tensor], steps: int) -> None:
    """Give every tensor moments of AdamW that are 0 after `steps` steps, to be filled in."""
    for tensor in tensors:
        zeros = {kind: torch.zeros_like(tensor, requires_grad=False) for kind in MOMENTS["adamw"]}
        optimizer.state[tensor] = {"step": torch.tensor(float(steps)), **zeros}
