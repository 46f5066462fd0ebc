"""Private decoding against plain sampling: tokens per second on the same requests.

    python tests/benchmarks/bench_lockstep.py [--json] [--groups 4] [--rows 32] [--tokens 64]

A random model of about 60 M parameters (Llama shape). A token is one row's: G groups of R rows
(R - 1 private prompts and the public one) and T positions are G * R * T tokens, whoever samples
them. The ways take turns, so that a busy machine slows all of them; the median of the rounds is
shown, the ratio is the median of the rounds' ratios. The prefix cache is emptied before every
measurement.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dpray.config.sections import EngineConfig
from dpray.engines.base import LockstepGroup, LockstepResult, Prompt, SelectorSpec
from dpray.engines.transformers import TransformersEngine
from dpray.engines.vllm import VllmEngine
from dpray.mechanisms.randomness import new_key
from dpray.methods.private_prediction.token import PrivateToken, selector_arguments
from tests.engines.tiny_model import make_model, sentence

PLAIN = "vLLM, plain sampling"
TARGET = 0.9
SHAPE = {"vocabulary": 16384, "hidden": 512, "intermediate": 1408, "layers": 14, "heads": 8}


def make_groups(
    engine: Any, groups: int, rows: int, tokens: int, **mechanism: Any
) -> list[LockstepGroup]:
    rng = random.Random(1)
    token = PrivateToken(
        batch_size=rows - 1,
        private_tokens=10**9,
        clip="recentred",
        clip_bound=10.0,
        temperature=2.0,
        public_temperature=1.5,
        **mechanism,
    )
    made = []
    for number in range(groups):
        private = tuple(
            engine.encode(Prompt(sentence(rng, rng.randint(10, 30)), "Text:"))
            for _ in range(rows - 1)
        )
        public = engine.encode(Prompt("a text about anything", "Text:"))
        spec = SelectorSpec(
            "dpray.methods.private_prediction.token:PrivateTokenSelector",
            selector_arguments(token, new_key()),
        )
        made.append(LockstepGroup(str(number), private, public, spec, tokens))
    return made


def private_tokens(engine: Any, groups: list[LockstepGroup]) -> int:
    """Decodes the groups; how many row tokens that were."""
    rows = {group.group_id: len(group.private_prompts) + 1 for group in groups}
    done = 0

    def count(result: LockstepResult) -> None:
        nonlocal done
        done += rows[result.group_id] * len(result.token_ids)

    engine.decode_lockstep(groups, count)
    return done


def plain_tokens(engine: Any, groups: list[LockstepGroup], **options: Any) -> int:
    """The same requests, each sampled by itself."""
    import vllm

    params = vllm.SamplingParams(
        temperature=1.0, max_tokens=groups[0].max_tokens, ignore_eos=True, **options
    )
    prompts = [
        {"prompt_token_ids": list(prompt)}
        for group in groups
        for prompt in (*group.private_prompts, group.public_prompt)
    ]
    outputs = engine.llm.generate(prompts, params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def rate(work: Callable[[], int]) -> float:
    began = time.perf_counter()
    tokens = work()
    return tokens / (time.perf_counter() - began)


def measure(
    folder: str, groups: int, rows: int, tokens: int, rounds: int
) -> dict[str, list[float]]:
    engine: Any = VllmEngine(EngineConfig(model=folder, kv_cache_gib=3.0))
    small = make_groups(engine, 1, rows, 4)

    def requests(**mechanism: Any) -> list[LockstepGroup]:
        return make_groups(engine, groups, rows, tokens, **mechanism)

    sparse_vector = {"threshold": 0.3, "noise": 0.1}
    ways: dict[str, Callable[[], int]] = {
        PLAIN: lambda: plain_tokens(engine, requests()),
        "vLLM, plain, ids only": lambda: plain_tokens(engine, requests(), detokenize=False),
        "vLLM, private": lambda: private_tokens(engine, requests()),
        "vLLM, private, sparse vector": lambda: private_tokens(engine, requests(**sparse_vector)),
    }
    plain_tokens(engine, small)  # the first run pays for lazy set-up
    private_tokens(engine, small)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            engine.llm.reset_prefix_cache()
            rates[name].append(rate(way))
    private = requests()
    engine.close()
    engine = TransformersEngine(EngineConfig(model=folder))
    private_tokens(engine, small)
    rates["transformers, private"] = [rate(lambda: private_tokens(engine, private))] * rounds
    return rates


def main(
    groups: int = 4,
    rows: int = 32,
    tokens: int = 64,
    rounds: int = 3,
    as_json: bool = typer.Option(False, "--json"),
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), context=512, **SHAPE)
        rates = measure(str(model), groups, rows, tokens, rounds)
    result: dict[str, dict[str, Any]] = {
        name: {
            "rounds": found,
            "tokens_per_second": statistics.median(found),
            "ratio": statistics.median(a / b for a, b in zip(found, rates[PLAIN], strict=True)),
        }
        for name, found in rates.items()
    }
    if as_json:
        print(json.dumps({"groups": groups, "rows": rows, "tokens": tokens, "ways": result}))
        return
    table = Table(
        title=f"{groups} groups of {rows} rows, {tokens} tokens, target {TARGET} of plain"
    )
    for column in ("", "tokens per second", "of plain"):
        table.add_column(column, justify="right" if column else "left")
    for name, row in result.items():
        table.add_row(name, f"{row['tokens_per_second']:,.0f}", f"{row['ratio']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
