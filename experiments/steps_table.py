"""Steps of DP-SGD with dpray, with Opacus and without privacy, for experiments/results_tables.md.

`python experiments/peers_table.py FOLDER steps [ROUNDS [LENGTH BATCH THREADS PRECISION]...]` has
every way make the same steps, one after the other, in processes of their own, and keeps the CPU
seconds and the memory in experiments/measured/peers/steps.json. The batches are Poisson samples of
AG News. The sums of the clipped gradients of a first batch have to agree.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from runs import DATA, HERE, RUNS, rows
from transformers import AutoTokenizer

from dpray.engines.model_path import smollm2_folder

FILE = HERE / "measured" / "peers" / "steps.json"
WAYS = ("dpray", "opacus", "plain")
FIRST = 8
"""Texts of the first batch, which is not timed."""

ROUNDING = {"float32": 1e-4, "bfloat16": 0.1}
"""How far, of its norm, Opacus's sum of clipped gradients may be from dpray's."""


class Cell(NamedTuple):
    """One row: the most tokens of a text, B, threads, and the precision of the arithmetic."""

    length: int
    batch: int
    threads: int
    precision: str

    @property
    def name(self) -> str:
        return f"{self.length} {self.batch} {self.threads} {self.precision}"


CELLS = [Cell(*values) for values in product((48, 128), (32, 256), (1, 2), ("float32", "bfloat16"))]


def measure(words: Sequence[str]) -> None:
    """Add rounds to the cells that are named, or to all."""
    rounds = int(words[0]) if words else 5
    numbers = zip(*[iter(words[1:])] * 4, strict=True)
    cells = [Cell(int(a), int(b), int(c), d) for a, b, c, d in numbers] or CELLS
    for _ in range(rounds):
        for cell in cells:
            add_round(cell)


def add_round(cell: Cell) -> None:
    """Have every way make the same steps once; who begins changes from round to round."""
    number = len(kept().get(cell.name, {}).get(WAYS[0], ()))
    folder = RUNS / "peers" / "steps" / cell.name.replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "batches.json").write_text(json.dumps(batches(cell, number)))
    turns = (*WAYS[number % 3 :], *WAYS[: number % 3])
    costs = {way: made(cell, way, folder) for way in turns}
    compare(cell, folder)
    found = kept()
    of_cell = found.setdefault(cell.name, {way: [] for way in WAYS})
    for way in WAYS:
        of_cell[way].append(costs[way])
    FILE.write_text(json.dumps(found, indent=1) + "\n")


def kept() -> dict[str, dict[str, list[dict[str, float]]]]:
    """Return what was measured so far: by cell and way, the rounds."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def batches(cell: Cell, seed: int) -> list[list[tuple[list[int], int]]]:
    """Return the first batch, and a Poisson sample."""
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_folder())
    texts = rows(DATA / "agnews" / "private.jsonl")
    rng = np.random.default_rng(seed)

    def encoded(text: dict[str, Any]) -> tuple[list[int], int]:
        code = tokenizer(f"News Type: {text['label']}\n")["input_ids"]
        ids = [*code, *tokenizer(text["text"])["input_ids"], tokenizer.eos_token_id]
        return ids[: cell.length], min(len(code), cell.length)

    joins = rng.random(len(texts)) < cell.batch / len(texts)
    sample = [text for text, joined in zip(texts, joins, strict=True) if joined]
    return [[encoded(text) for text in batch] for batch in (texts[:FIRST], sample)]


def made(cell: Cell, way: str, folder: Path) -> dict[str, float]:
    """Return the CPU seconds of a way's step, and the most GiB of its process."""
    script = HERE / "peers" / ("dpray_sgd.py" if way == "dpray" else "opacus_sgd.py")
    options = {
        "model": smollm2_folder(),
        "batches": folder / "batches.json",
        "out": folder / f"{way}.pt",
        "expected": cell.batch,
        "precision": cell.precision,
        "threads": cell.threads,
    }
    command = [sys.executable, f"{script}", *(f"--{name}={x}" for name, x in options.items())]
    if way != "dpray":
        command.append(f"--way={way}")
    # Else a thread that waits for another one, which has no core, counts as CPU time.
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    printed = done.stdout
    found = json.loads(printed.splitlines()[-1])
    return {"seconds": round(found["seconds"][0], 2), "gib": round(found["gib"], 2)}


def compare(cell: Cell, folder: Path) -> None:
    """Stop if the sums of clipped gradients of dpray and Opacus differ by more than rounding."""
    ours, theirs = (torch.load(folder / f"{way}.pt") for way in WAYS[:2])
    other = torch.cat([theirs[f"_module.{name}"].flatten().float() for name in ours])
    mine = torch.cat([each.flatten() for each in ours.values()])
    apart = float((mine - other).norm() / mine.norm())
    print(f"{cell.name}: the sums are {apart:.1e} apart", flush=True)
    if not apart <= ROUNDING[cell.precision]:
        raise SystemExit(f"{cell.name}: Opacus has another sum of clipped gradients")


def table() -> list[str]:
    """Return the lines of the table; none if nothing was measured."""
    if not (found := kept()):
        return []
    return [
        "",
        "DP-SGD on adapters of rank 8: CPU seconds of a step on the same Poisson samples of AG "
        "News, and the most memory of the process. Opacus 1.6 (per-sample gradients) and plain "
        "training pad to the longest of 16 texts. Medians of the rounds; ratios are medians of "
        "the ratios within a round (`python experiments/peers_table.py FOLDER steps`).",
        "",
        "| tokens | B | threads | precision | rounds | dpray | Opacus | plain | dpray / Opacus "
        "| dpray / plain | GiB: dpray | Opacus | plain |",
        "|---:|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        *(line(cell, found[cell.name]) for cell in CELLS if cell.name in found),
    ]


def line(cell: Cell, of_cell: dict[str, list[dict[str, float]]]) -> str:
    seconds = {way: [each["seconds"] for each in of_cell[way]] for way in WAYS}
    ratios = [
        median(a / b for a, b in zip(seconds["dpray"], seconds[way], strict=True))
        for way in WAYS[1:]
    ]
    numbers = [
        *(f"{median(seconds[way]):.1f}" for way in WAYS),
        *(f"{ratio:.2f}" for ratio in ratios),
        *(f"{median(each['gib'] for each in of_cell[way]):.1f}" for way in WAYS),
    ]
    head = [*map(str, cell), str(len(seconds["dpray"]))]
    return f"| {' | '.join([*head, *numbers])} |"
