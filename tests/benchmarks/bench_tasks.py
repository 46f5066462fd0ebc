"""An engine would run empty at the end of every task (`runtime.batches_per_task`) if it did not
take the next one before: this measures what that would cost, by their size.

    python tests/benchmarks/bench_tasks.py [--batches 192] [--at-once 8] [--rows 17] [--tokens 64]

A batch is one text whose length is random, at most `tokens`. The engine holds `at-once` batches,
and gets them in tasks, the next one when the last batch of the one before is done; the last line is
one task, which is how an actor's engine is fed. Steps are the model's; a GPU takes nearly as long
for a step with few rows as for a full one, a CPU does not.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dpray.config.sections import EngineConfig
from dpray.engines.base import LockstepGroup, Prompt, SelectorSpec
from dpray.engines.vllm import VllmEngine
from tests.engines.tiny_model import make_model, sentence


def main(batches: int = 192, at_once: int = 8, rows: int = 17, tokens: int = 64) -> None:
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_model(Path(folder)))
        engine = VllmEngine(EngineConfig(model=model, max_num_seqs=at_once * rows))
        groups = []
        for number in range(batches):
            limit = min(tokens, 1 + int(rng.expovariate(1.6 / tokens)))
            spec = SelectorSpec(
                "tests.engines.token_selectors:MeanSampler", {"seed": number, "limit": limit}
            )
            prompts = [
                engine.encode(Prompt(sentence(rng, rng.randint(5, 20)), "Text:"))
                for _ in range(rows)
            ]
            groups.append(LockstepGroup(str(number), tuple(prompts[1:]), prompts[0], spec, tokens))
        step, steps = engine.step, 0

        def counted() -> list[object]:
            nonlocal steps
            steps += 1
            return step()

        engine.step = counted  # type: ignore[method-assign]
        print(f"{batches} batches of {rows} rows, {at_once} at once\n")
        print("| batches a task | steps | seconds |\n|---:|---:|---:|")
        list(engine.decode_lockstep(groups[:at_once]))  # pays for lazy set-up
        for size in (at_once, 2 * at_once, 4 * at_once, 8 * at_once, batches):
            engine.llm.reset_prefix_cache()
            steps, began = 0, time.perf_counter()
            for start in range(0, batches, size):
                list(engine.decode_lockstep(groups[start : start + size]))
            print(f"| {size} | {steps} | {time.perf_counter() - began:.1f} |")
        engine.close()


if __name__ == "__main__":
    typer.run(main)
