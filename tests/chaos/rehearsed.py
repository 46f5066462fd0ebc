"""The four methods, each as a small run in this process: what kills at named points are tried on.

All records hold the word `Marlowe`, which no output may hold. The engines and the embedder are
stand-ins that start in no time; DP-SGD trains a real model of two layers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from dpray.ledger.ledger import Ledger
from dpray.methods import registry
from dpray.methods.config import parse_config
from dpray.types import Budget
from dpray.workers import shards
from dpray.workers.engine import build_engine
from tests.engines.bag_of_words import BagOfWords
from tests.engines.tiny_model import make_model, sentence
from tests.faults.driver import build

RECORDS = 60

METHODS: dict[str, dict[str, Any]] = {
    "private_prediction": {
        "name": "private_prediction", "batches": "poisson", "batch_size": 5, "max_tokens": 4,
        "max_records": 8, "clip_bound": 1.0,
    },
    "aug_pe": {
        "name": "aug_pe", "records": 4, "iterations": 2, "variations": 2, "max_tokens": 8,
        "word_var": None,
    },
    "dp_kps": {
        "name": "dp_kps", "vocabulary_size": 7, "phrases_per_record": 4, "sequence_length": 3,
        "records": 4, "max_tokens": 8,
    },
    "dp_sgd": {
        "name": "dp_sgd", "epochs": 1, "batch_size": 15, "micro_batch_size": 8, "max_length": 16,
        "lora_rank": 2, "learning_rate": 0.01, "records": 4, "noise_multiplier": 1.5,
        "checkpoint_steps": 2,
    },
}  # fmt: skip


class Rehearsed:
    """One method's runs; the files that all of them read lie in `folder`."""

    def __init__(self, method: str, folder: Path) -> None:
        self.method = method
        self.data = folder / "records.jsonl"
        rng = random.Random(1)
        rows = (
            {"text": f"{sentence(rng, 8)} Marlowe {n}", "label": "ab"[n % 2]}
            for n in range(RECORDS)
        )
        self.data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.words = write_words(folder)
        self.model = "tests/words"
        if method == "dp_sgd":
            self.model = str(make_model(folder / "tiny"))
        shards.SentenceTransformerEmbedder = BagOfWords  # type: ignore

    def tree(self, output: Path, ledger: str, **changes: Any) -> dict[str, Any]:
        method = dict(METHODS[self.method])
        if self.method == "dp_kps":
            method["vocabulary"] = self.words
        labels = {"label": "label", "labels": ["a", "b"], "public_size": RECORDS}
        return {
            "data": {"path": str(self.data)} | labels,
            "privacy": {"epsilon": 50.0, "delta": 1e-5, "ledger": ledger, "dataset": "notes"},
            "method": method | changes,
            "engine": {"kind": "transformers", "model": self.model},
            "runtime": {"ray_address": "none", "batches_per_task": 4},
            "output": {"path": str(output)},
        }

    def run(self, tree: dict[str, Any]) -> dict[str, Any]:
        engine: Callable[..., Any] = partial(build, "none", "")
        if self.method == "dp_sgd":
            engine = build_engine
        return registry.run(parse_config(tree), build=engine)


def write_words(folder: Path) -> str:
    """Write the vocabulary of DP-KPS to a folder; return the file."""
    file = folder / "words.txt"
    file.write_text("".join(f"word{n}\n" for n in range(20)))
    return str(file)


def make_budget(ledger: str) -> None:
    """Make a ledger with room for the repeats of one run, and for a little more."""
    with closing(Ledger.create_or_open(ledger)) as opened:
        opened.create_dataset("notes", Budget(500, 1e-3), "record", "add_or_remove_one")
