"""The prompts that several Poisson batches share, in vLLM's prefix cache: CPU seconds of a text.

    python -m tests.benchmarks.bench_shared_records [--json] [--model smollm2] [--records 600]
        [--texts 60] [--gib 0.1] [--words 60] [--tokens 48]

One text after the other is decoded from batches of 16 records of one of 4 labels. Two engines take
turns with the same batches: one gets them as the labels take turns, the other label by label. A
`repeated` row has the prompt of a row in an earlier batch. `in the cache` is the share of the
prompts' tokens that were not computed. Without `--model` the model is a random one of 4 layers.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from dpray.engines.base import LockstepGroup, Prompt
from dpray.mechanisms.batches import PoissonBatches
from dpray.mechanisms.randomness import new_key
from dpray.methods.private_prediction.token import PrivateToken
from tests.benchmarks.bench_lockstep import SHAPE
from tests.benchmarks.bench_parts import Counted
from tests.engines.tiny_model import make_model, sentence

LABELS = ("a", "b", "c", "d")
SIZE = 16
TOKEN = PrivateToken(SIZE, 10**9, "dclip", 2.0, 0.7, 1.5)


def groups_of(
    encode: Callable[[Prompt], tuple[int, ...]], records: int, texts: int, words: int, tokens: int
) -> list[LockstepGroup]:
    """Return the groups of all batches, as the labels take turns."""
    rng, secret = random.Random(1), new_key()
    shares = dict.fromkeys(LABELS, 1 / len(LABELS))
    batches = PoissonBatches.expected(records, shares, SIZE, texts)
    rows: dict[str, list[tuple[int, ...]]] = {batch: [] for batch in batches.batch_ids()}
    for number in range(records):
        prompt = encode(Prompt(sentence(rng, rng.randint(words // 2, 3 * words // 2)), "Text:"))
        for batch in batches.joined(secret, LABELS[number % len(LABELS)], f"row {number}"):
            rows[batch].append(prompt)
    public = encode(Prompt("a text about anything", "Text:"))
    return [
        LockstepGroup(batch, tuple(private), public, TOKEN.selector(new_key()), tokens)
        for batch, private in rows.items()
    ]


def measured(engines: dict[str, Counted], groups: list[LockstepGroup]) -> dict[str, dict[str, Any]]:
    orders = {
        "labels take turns": groups,
        "label by label": sorted(groups, key=lambda group: group.group_id.split("/")[0]),
    }
    decoding = {name: engines[name].engine.decode_lockstep(orders[name]) for name in orders}
    spent, decoded = dict.fromkeys(orders, 0.0), dict.fromkeys(orders, 0)
    rows = {group.group_id: len(group.prompts) for group in groups}
    for _ in groups:
        for name, results in decoding.items():
            began = time.process_time()
            text = next(results)
            spent[name] += time.process_time() - began
            # The pass of a prompt draws the first token.
            decoded[name] += rows[text.group_id] * (len(text.token_ids) - 1)
    prompts = sum(len(prompt) for group in groups for prompt in group.prompts)
    return {
        name: {
            "seconds": spent[name] / len(groups),
            "hits": 1 - (engines[name].computed - decoded[name]) / prompts,
        }
        for name in orders
    }


def main(
    model: str = "",
    records: int = 600,
    texts: int = 60,
    gib: float = 0.1,
    words: int = 60,
    tokens: int = 48,
    as_json: bool = typer.Option(False, "--json"),
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = model or str(make_model(Path(folder), vocabulary=4096, context=1024, **SHAPE))
        engines = {
            name: Counted(model, 512, gib) for name in ("labels take turns", "label by label")
        }
        encode = engines["label by label"].engine.encode
        groups = groups_of(encode, records, texts, words, tokens)
        found = measured(engines, groups)
        for each in engines.values():
            each.engine.close()
    private = [prompt for group in groups for prompt in group.private_prompts]
    repeated = 1 - len(set(private)) / len(private)
    if as_json:
        print(json.dumps({"repeated": repeated, "orders": found}))
        return
    table = Table(title=f"{repeated:.0%} of {len(private)} rows are repeated")
    for column in ("order", "in the cache", "seconds a text", "of the first"):
        table.add_column(column, justify="left" if column == "order" else "right")
    first = found["labels take turns"]["seconds"]
    for name, one in found.items():
        ratio = one["seconds"] / first
        table.add_row(name, f"{one['hits']:.0%}", f"{one['seconds']:.2f}", f"{ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
