"""Flips of the candidate set: does a private row beside it move a token in or out?

    python -m tests.benchmarks.bench_candidates [--model FOLDER] [--rows 16] [--groups 8]

A group is decoded twice, the second time with one private row more, a long one, along the same
tokens. At every position the tokens are ordered by their public logits, and the sets of the k
highest are compared for k = 1 to 1,000: each k is an edge, and an edge where the two sets differ is
a flip. `shared` is the public prompt as one more row of the private rows' forward passes; `alone`
is what the engines hand to the mechanism. A flip gives some token a chance in one of two
neighbouring worlds only.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from dpray.config.sections import EngineConfig
from dpray.engines.base import (
    Engine,
    HostSync,
    LockstepGroup,
    Prompt,
    Selected,
    Selection,
    SelectorSpec,
)
from dpray.io.records import read_rows
from dpray.workers.engine import build_engine

EDGES = 1000
ROOT = Path(__file__).resolve().parents[2]
NOTES = ROOT / "dpray" / "demo" / "data" / "private.jsonl"


class Orders:
    """A `TokenSelector` that keeps the order of the public row's tokens, `alone` and, of the last
    private row, which holds the same prompt, `shared`; it says `script`'s tokens."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.orders: dict[str, list[list[int]]] = {"shared": [], "alone": []}

    def select(
        self,
        logits_private_SV: torch.Tensor,
        highest_S: torch.Tensor,
        logits_public_V: torch.Tensor,
    ) -> Selection:
        rows_2V = torch.stack([logits_private_SV[-1], logits_public_V]).float()
        order = torch.argsort(rows_2V, dim=-1, descending=True, stable=True)
        return HostSync(order[:, :EDGES], self.keep)

    def keep(self, order: torch.Tensor) -> Selection:
        for name, row in zip(self.orders, order.long().reshape(2, -1).tolist(), strict=True):
            self.orders[name].append(row)
        return Selected(self.script[len(self.orders["alone"]) - 1])

    def state(self) -> dict[str, Any]:
        return {"orders": self.orders}


def flips(one: list[int], other: list[int]) -> int:
    """The number of k for which the k highest tokens are not the same set."""
    inside: set[int] = set()
    found = 0
    for a, b in zip(one, other, strict=True):
        inside ^= {a}
        inside ^= {b}
        found += bool(inside)
    return found


def decode(engine: Engine, group: LockstepGroup) -> dict[str, list[list[int]]]:
    (text,) = engine.decode_lockstep([group])
    orders: dict[str, list[list[int]]] = text.state["orders"]
    return orders


def measure(
    engine: Engine, texts: list[str], groups: int, rows: int, tokens: int
) -> dict[str, Any]:
    rng = random.Random(1)
    public = engine.encode(Prompt("Here is a note. Please give me another one.", "Note:"))
    counts = {"shared": 0, "alone": 0}
    positions = 0
    for number in range(groups):
        chosen = rng.sample(texts, rows + 3)
        members = [*chosen[:rows], " ".join(chosen[rows:])]
        private = [
            engine.encode(Prompt(f"Here is a note. {text} Please give me another one.", "Note:"))
            for text in members
        ]
        script = list(private[0][-tokens:])
        spec = SelectorSpec("tests.benchmarks.bench_candidates:Orders", {"script": script})
        worlds = [
            decode(engine, LockstepGroup(str(number), (*world, public), public, spec, len(script)))
            for world in (private[:-1], private)
        ]
        positions += len(worlds[0]["alone"])
        for name in counts:
            pairs = zip(worlds[0][name], worlds[1][name], strict=True)
            counts[name] += sum(flips(one, other) for one, other in pairs)
    return {"edges": positions * EDGES, **counts}


def main(
    model: str = str(ROOT / "dpray" / "demo" / "model"),
    groups: int = 8,
    rows: int = 16,
    tokens: int = 24,
) -> None:
    texts = [str(row["text"]) for _, row in read_rows(str(NOTES))]
    results = []
    for kind in ("transformers", "vllm"):
        for dtype in ("float32", "bfloat16"):
            section = {"kind": kind, "model": model, "dtype": dtype}
            config = EngineConfig.model_validate(
                section | {"max_model_len": 512, "kv_cache_gib": 1.0}
            )
            engine = build_engine(config, public_alone=True)
            counts = measure(engine, texts, groups, rows, tokens)
            engine.close()
            results.append({"engine": kind, "dtype": dtype, **counts})
    table = Table("engine", "dtype", "edges", "flips, shared pass", "flips, alone")
    for result in results:
        table.add_row(
            *(f"{value:,}" if isinstance(value, int) else value for value in result.values())
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
