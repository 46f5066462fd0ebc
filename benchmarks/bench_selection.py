"""Counts the tensor operations that choose a step's tokens, and how often the host waits for a
value.

    python -m benchmarks.bench_selection [--json] [--rows 16] [--vocabulary 4096]

On a GPU each operation is a kernel that the host starts, and each wait stops it until the device is
done: with small kernels they are the time of a step. The counts are those of any device, and are
taken on the CPU. A group has `--rows` private rows of random logits; the logits of all groups are
in one matrix, as an engine has them. The engine's own look at the rows' highest logits counts once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.bench_lockstep import DCLIP, RECENTRED
from dpray.engines import base
from dpray.engines.base import select_tokens
from dpray.engines.finite_rows import highest
from dpray.mechanisms.randomness import new_key
from dpray.methods.private_prediction.token import PrivateToken, PrivateTokenSelector

GROUPS = (1, 8, 32)

WAYS: dict[str, dict[str, Any]] = {
    "recentred": RECENTRED,
    "dclip": DCLIP,
    "dclip, top_k_plus": DCLIP | {"candidates": "top_k_plus", "k": 200},
    "public gate": DCLIP | {"sure_probability": 0.9},
    "sparse vector": RECENTRED | {"threshold": 0.5, "noise": 0.1},
}

VIEWS = {
    "aten.view", "aten._unsafe_view", "aten.slice", "aten.select", "aten.unsqueeze",
    "aten.squeeze", "aten.expand", "aten.split", "aten.split_with_sizes", "aten.detach",
    "aten.alias", "aten.t", "aten.transpose", "aten.empty", "aten.new_empty", "aten.empty_like",
}  # fmt: skip
"""The operations that compute nothing."""


@dataclass(frozen=True)
class Counts:
    way: str
    groups: int
    operations: int
    waits: int


class Counted(TorchDispatchMode):
    """Counts the operations that run under it, by what the device does."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.waits = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = str(func.overloadpacket)
        self.operations += name not in VIEWS
        self.waits += name == "aten.nonzero"  # the host has to know how many there are
        return func(*args, **(kwargs or {}))


def counts(way: str, groups: int, rows: int, vocabulary: int) -> Counts:
    """Count one step of `groups` groups. A copy of values to the host is a wait."""
    mechanism = PrivateToken(batch_size=rows, private_tokens=8, public_temperature=1.0, **WAYS[way])
    chosen = [PrivateTokenSelector(mechanism.values, new_key()) for _ in range(groups)]
    logits_NV = torch.randn(groups * (rows + 1), vocabulary)
    copy, copies = base._on_host, 0

    def on_host(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        nonlocal copies
        copies += 1
        return copy(tensors)

    with patch.object(base, "_on_host", on_host), Counted() as counted:
        highest_N = highest(logits_NV)
        parts = zip(logits_NV.split(rows + 1), highest_N.split(rows + 1), strict=True)
        select_tokens(
            [
                selector.select(own_SV[:-1], highest_S[:-1], own_SV[-1])
                for selector, (own_SV, highest_S) in zip(chosen, parts, strict=True)
            ]
        )
    return Counts(way, groups, counted.operations, counted.waits + copies)


def main(
    rows: int = 16, vocabulary: int = 4096, as_json: bool = typer.Option(False, "--json")
) -> None:
    found = [counts(way, groups, rows, vocabulary) for way in WAYS for groups in GROUPS]
    if as_json:
        print(json.dumps([asdict(each) for each in found]))
        return
    table = Table("way", "groups", "operations a step", "waits a step")
    for each in found:
        table.add_row(each.way, *map(str, (each.groups, each.operations, each.waits)))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
