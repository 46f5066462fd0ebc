"""Counts the tensor operations that choose a step's tokens, how often the host waits for a value,
and the memory that they take.

    python -m benchmarks.bench_selection [--json] [--rows 16] [--vocabulary 4096]

On a GPU each operation is a kernel that the host starts, and each wait stops it until the device is
done: with small kernels they are the time of a step. The counts are those of a GPU, taken without
one: tensors of torch's "meta" device have shapes and no numbers, so an operation that needs to know
a number fails. They hold up to 2^24 logits in a step; more are worked on in parts.
A group has `--rows` private rows; the logits of all groups are in one matrix, as an engine has
them. The engine's own look at the rows' highest logits, and at which rows are finite, counts too.
Memory is the most that lives at a time next to these logits.
"""

from __future__ import annotations

import json
import weakref
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.bench_lockstep import DCLIP, RECENTRED
from dpray.engines.base import GroupLogits, Selected, select_tokens
from dpray.engines.finite_rows import FiniteRows, highest, remember_together
from dpray.mechanisms.randomness import new_key
from dpray.methods.private_prediction.mechanism import PrivateToken
from dpray.methods.private_prediction.token import PrivateTokenSelector

GROUPS = (1, 8, 32)

WAYS: dict[str, dict[str, Any]] = {
    "recentred": RECENTRED,
    "dclip": DCLIP,
    "dclip, top_k_plus": DCLIP | {"candidates": "top_k_plus", "k": 200},
    "public gate": DCLIP | {"sure_probability": 0.9},
    "sparse vector": RECENTRED | {"threshold": 0.5, "noise": 0.1},
    "gate and sparse vector": RECENTRED | {"sure_probability": 0.9, "threshold": 0.5, "noise": 0.1},
    "dclip, schema": DCLIP,
}

VIEWS = {
    "aten.view", "aten._unsafe_view", "aten.slice", "aten.select", "aten.unsqueeze",
    "aten.squeeze", "aten.expand", "aten.split", "aten.split_with_sizes", "aten.detach",
    "aten.alias", "aten.t", "aten.transpose", "aten.empty", "aten.new_empty", "aten.empty_like",
    "aten.unbind",
}  # fmt: skip
"""The operations that compute nothing."""


@dataclass(frozen=True)
class Counts:
    way: str
    groups: int
    operations: int
    waits: int
    bytes: int


class Counted(TorchDispatchMode):
    """Counts the operations that run under it, by what the device does, and the most bytes of their
    results that live at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.waits = self.bytes = self.living = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name, kwargs = str(func.overloadpacket), kwargs or {}
        if (
            name == "aten._to_copy"
            and args[0].is_meta
            and kwargs.get("device") == torch.device("cpu")
        ):
            self.waits += 1
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        found = func(*args, **kwargs)
        given, made = storages((args, kwargs)), storages(found)
        self.operations += bool(made) and name not in VIEWS
        for storage in (made[key] for key in made.keys() - given.keys()):
            self.living += storage.nbytes()
            weakref.finalize(storage, self._freed, storage.nbytes())
        self.bytes = max(self.bytes, self.living)
        return found

    def _freed(self, size: int) -> None:
        self.living -= size


def storages(values: object) -> dict[int, torch.UntypedStorage]:
    """Return the memory of tensors on the device, which several may share."""
    tensors = (each for each in tree_leaves(values) if isinstance(each, torch.Tensor))
    found = (each.untyped_storage() for each in tensors if each.is_meta)
    return {id(storage): storage for storage in found}


class AnyToken:
    """Stands in for a schema's mask: it allows every second token."""

    was_closed = False

    def __init__(self, vocabulary: int) -> None:
        self.allowed = np.arange(vocabulary) % 2 == 0

    def forced(self, must_end: bool) -> None:
        """There is always a choice."""

    def take(self, token: int) -> int:
        return token


def counts(way: str, groups: int, rows: int, vocabulary: int) -> Counts:
    """Count one step of `groups` groups."""
    mechanism = PrivateToken(
        batch_size=max(1, rows), private_tokens=8, public_temperature=1.0, **WAYS[way]
    )
    device = torch.device("meta")
    chosen = [PrivateTokenSelector(mechanism.values, new_key()) for _ in range(groups)]
    for selector in chosen if "schema" in way else []:
        selector.mask = AnyToken(vocabulary)  # type: ignore[assignment]
    finite = [FiniteRows(rows, device) for _ in chosen]
    logits_NV = torch.empty(groups * (rows + 1), vocabulary, device=device)
    with Counted() as counted:
        parts_NV, highest_N = logits_NV.split(rows + 1), highest(logits_NV).split(rows + 1)
        highest_GS = remember_together(finite, [highest_S[:-1] for highest_S in highest_N])
        ends = select_tokens(
            [
                selector.select(GroupLogits(own_SV[:-1], highest_S, own_SV[-1]))
                for selector, own_SV, highest_S in zip(chosen, parts_NV, highest_GS, strict=True)
            ]
        )
    assert all(isinstance(end, Selected) for end in ends), ends
    return Counts(way, groups, counted.operations, counted.waits, counted.bytes)


def main(
    rows: int = 16, vocabulary: int = 4096, as_json: bool = typer.Option(False, "--json")
) -> None:
    found = [counts(way, groups, rows, vocabulary) for way in WAYS for groups in GROUPS]
    if as_json:
        print(json.dumps([asdict(each) for each in found]))
        return
    table = Table("way", "groups", "operations a step", "waits a step", "memory, of the logits")
    for each in found:
        memory = f"{each.bytes / (each.groups * (rows + 1) * vocabulary * 4):.1f}"
        table.add_row(each.way, *map(str, (each.groups, each.operations, each.waits)), memory)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
