"""A batch that the engine does not hold at once, decoded in parts, against the same batch whole.

    python -m tests.benchmarks.bench_parts [--json] [--rows 32] [--tokens 16] [--rounds 3]

A small random model (Llama shape). The group and its coins are the same for every size of the KV
cache, and so have to be its tokens. On a CPU the seconds are those of the process's CPU time, which
other work on the machine hardly changes. The engines take turns; a ratio is the median of the
rounds' ratios to the engine of the same kind that holds the whole batch.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from dpray.config.sections import EngineConfig
from dpray.engines.base import Engine, LockstepGroup, Prompt
from dpray.engines.transformers import TransformersEngine
from dpray.engines.vllm import VllmEngine
from dpray.mechanisms.randomness import new_key
from dpray.methods.private_prediction.token import PrivateToken
from tests.engines.tiny_model import make_model, sentence

CLOCK = time.perf_counter if torch.cuda.is_available() else time.process_time
SHAPE = {"hidden": 256, "intermediate": 704, "layers": 4, "heads": 4, "vocabulary": 49_152}
TOKEN_BYTES = 2 * SHAPE["layers"] * SHAPE["hidden"] * 4
SHARES = (2.0, 0.75, 0.5, 0.25)
"""The KV cache holds this part of the batch."""


def group_of(engine: Engine, rows: int, tokens: int, key: str) -> LockstepGroup:
    rng = random.Random(1)
    token = PrivateToken(rows, 10**9, "dclip", 3.0, 1.0, 1.0, candidates="top_k_plus", k=200)
    private = (engine.encode(Prompt(sentence(rng, 60), "Text:")) for _ in range(rows))
    public = engine.encode(Prompt("a text about anything", "Text:"))
    spec = token.selector(key)
    return LockstepGroup("batch", tuple(private), public, spec, tokens)


def engines(folder: str, rows: int, row_tokens: int, stack: ExitStack) -> Iterator[Any]:
    for kind in (VllmEngine, TransformersEngine):
        for share in SHARES:
            gib = share * rows * row_tokens * TOKEN_BYTES / 2**30
            config = EngineConfig(model=folder, max_model_len=256, kv_cache_gib=gib)
            yield kind, share, stack.enter_context(closing(kind(config)))


def seconds_of(engine: Any, rows: int, tokens: int, key: str) -> tuple[float, tuple[int, ...]]:
    group = group_of(engine, rows, tokens, key)
    if isinstance(engine, VllmEngine):
        engine.llm.reset_prefix_cache()
    began = CLOCK()
    [text] = engine.decode_lockstep([group])
    return CLOCK() - began, text.token_ids


def main(rows: int = 32, tokens: int = 16, rounds: int = 3, as_json: bool = False) -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        make_model(Path(folder), **SHAPE)
        row_tokens = tokens + 110
        made = list(engines(folder, rows, row_tokens, stack))
        found: dict[tuple[str, float], list[float]] = {}
        for number in range(rounds + 1):
            key, drawn = new_key(), set()
            for kind, share, engine in made:
                seconds, ids = seconds_of(engine, rows, tokens, key)
                drawn.add(ids)
                if number:  # the first round pays for lazy set-up
                    found.setdefault((kind.__name__, share), []).append(seconds)
            if len(drawn) > 1:
                raise SystemExit("the engines drew different tokens")
    report = [
        {
            "engine": name,
            "holds": min(share, 1.0),
            "seconds": median(seconds),
            "ratio": median(s / w for s, w in zip(seconds, found[name, SHARES[0]], strict=True)),
        }
        for (name, share), seconds in found.items()
    ]
    if as_json:
        print(json.dumps(report))
        return
    table = Table("engine", "the cache holds of the batch", "seconds a text", "times as long")
    for one in report:
        cells = f"{one['holds']:.0%}", f"{one['seconds']:.1f}", f"{one['ratio']:.2f}"
        table.add_row(one["engine"], *cells)
    Console(width=100).print(table)
    print(f"{rows} rows, {tokens} tokens, {rounds} rounds: the same tokens from the same coins")


if __name__ == "__main__":
    typer.run(main)
