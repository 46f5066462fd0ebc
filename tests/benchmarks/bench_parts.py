"""A batch that is decoded in parts, against the same batch whole: CPU seconds of a text.

    python -m tests.benchmarks.bench_parts [--json] [--model smollm2] [--rows 24] [--words 100]
        [--tokens 8] [--rounds 3]

Each engine gets a KV cache that holds a share of the batch's blocks. The engines take turns, with
the same coins and so the same tokens; a ratio is the median of the rounds' ratios. `computed` are
the tokens that vLLM sends through the model, and `least` those that it has to: each token once, and
for every position after the first what does not fit the cache. Without `--model` the model is a
random one of 4 layers.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from dpray.config.sections import EngineConfig
from dpray.engines.base import LockstepGroup, Prompt
from dpray.engines.kv_cache import GIB, bytes_per_token
from dpray.engines.vllm.engine import VllmEngine
from dpray.mechanisms.randomness import new_key
from dpray.methods.private_prediction.token import PrivateToken
from tests.benchmarks.bench_lockstep import SHAPE, fill_vocabulary
from tests.engines.tiny_model import make_model, sentence

VOCABULARY = 49_152


class Counted:
    """An engine, with the tokens that its scheduler sends through the model."""

    def __init__(self, model: str, context: int, gib: float) -> None:
        config = EngineConfig(model=model, kv_cache_gib=gib, max_model_len=context)
        self.engine: Any = VllmEngine(config)
        self.computed = 0
        scheduler = self.engine.llm.llm_engine.engine_core.engine_core.scheduler
        schedule = scheduler.schedule

        def counted(*arguments: Any, **options: Any) -> Any:
            scheduled = schedule(*arguments, **options)
            self.computed += scheduled.total_num_scheduled_tokens
            return scheduled

        scheduler.schedule = counted

    def decode(self, group: LockstepGroup) -> tuple[float, tuple[int, ...]]:
        """Return the CPU seconds of the group's text, and its tokens."""
        self.engine.llm.reset_prefix_cache()
        self.computed = 0
        began = time.process_time()
        [text] = self.engine.decode_lockstep([group])
        return time.process_time() - began, text.token_ids


def group_of(engine: Any, rows: int, words: int, tokens: int) -> LockstepGroup:
    rng = random.Random(1)
    texts = [sentence(rng, rng.randint(words // 2, 3 * words // 2)) for _ in range(rows - 1)]
    return LockstepGroup(
        "batch",
        tuple(engine.encode(Prompt(text, "Text:")) for text in texts),
        engine.encode(Prompt("a text about anything", "Text:")),
        PrivateToken(rows - 1, 10**9, "dclip", 2.0, 1.0, 1.5).selector(new_key()),
        tokens,
    )


def measured(
    model: str, shares: list[float], rows: int, words: int, tokens: int, rounds: int
) -> dict[float, dict[str, float]]:
    context = 4 * words + tokens + 64
    whole = Counted(model, context, 1.0)
    engine = whole.engine
    group = group_of(engine, rows, words, tokens)
    block = engine.block_sizes[0] * bytes_per_token(engine.model_config, "float32") / GIB
    needed = sum(engine.blocks_of(len(prompt) + tokens) for prompt in group.prompts)
    engines = {1.0: whole}
    for share in shares:
        engines[share] = Counted(model, context, block * (1 + round(needed * share)))
    seconds: dict[float, list[float]] = {share: [] for share in engines}
    for turn in range(rounds + 1):
        drawn = {share: each.decode(group) for share, each in engines.items()}
        assert len({ids for _, ids in drawn.values()}) == 1
        for share, (spent, _) in drawn.items():
            if turn:  # the first one pays for lazy set-up
                seconds[share].append(spent)
    steps = len(drawn[1.0][1]) - 1
    prompts = sum(map(len, group.prompts))
    found = {}
    for share, each in engines.items():
        ratios = [a / b for a, b in zip(seconds[share], seconds[1.0], strict=True)]
        least = prompts + steps * max(rows, round((1 - share) * prompts))
        found[share] = {
            "seconds": median(seconds[share]),
            "ratio": median(ratios),
            "computed": each.computed,
            "least": least,
        }
        each.engine.close()
    return found


def main(
    share: list[float] = [0.75, 0.5, 0.25],  # noqa: B006
    model: str = "",
    rows: int = 24,
    words: int = 100,
    tokens: int = 8,
    rounds: int = 3,
    as_json: bool = typer.Option(False, "--json"),
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if not model:
            model = str(make_model(Path(folder), vocabulary=VOCABULARY, context=1024, **SHAPE))
            fill_vocabulary(Path(folder), VOCABULARY)
        found = measured(model, share, rows, words, tokens, rounds)
    if as_json:
        print(json.dumps(found))
        return
    table = Table(title=f"{rows} rows, {tokens} tokens")
    for column in ("in the cache", "seconds", "times as long", "computed", "least"):
        table.add_column(column, justify="right")
    for part, one in found.items():
        table.add_row(
            f"{part:.0%}",
            f"{one['seconds']:.2f}",
            f"{one['ratio']:.2f}",
            f"{one['computed']:,.0f}",
            f"{one['least']:,.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
