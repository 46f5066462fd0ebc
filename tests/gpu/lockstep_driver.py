"""`python lockstep_driver.py MODEL KERNELS TOKENS GROUPS SIZE...` prints JSON lines, each of a way:
private decoding in vLLM, beside plain sampling of the same requests, in groups of SIZE private rows
and a public one.
`KERNELS` are vLLM's batch-`invariant` ones, or its `ordinary` ones.

A program of its own: the kernels are chosen once in a process. Several of them load at the same
time, and measure one after the other.
"""

from __future__ import annotations

import fcntl
import json
import sys
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

MEASURED = ["plain", "recentred", "dclip", "dclip, top_k_plus"]

CACHE = 4 * 2**30
"""The bytes of the KV cache on a GPU."""


def share_gpu() -> None:
    """Let processes load models on a GPU at the same time. By itself vLLM finds out what memory is
    free, and takes nearly all of it."""
    from dpray.engines.vllm import model

    options_of = model.vllm_options

    def shared(*config: Any, on_gpu: bool, **sizes: Any) -> dict[str, Any]:
        options = options_of(*config, on_gpu=on_gpu, **sizes)
        memory = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": CACHE}
        return options | (memory if on_gpu else {})

    model.vllm_options = shared


def main(folder: str, kernels: str, tokens: int, groups: int, sizes: list[int]) -> None:
    with Path(__file__).open() as turn:
        fcntl.flock(turn, fcntl.LOCK_SH)
        measure(folder, kernels, tokens, groups, sizes, turn)


def measure(
    folder: str, kernels: str, tokens: int, groups: int, sizes: list[int], turn: TextIO
) -> None:
    from benchmarks.bench_lockstep import Bench, rounds_of

    share_gpu()
    bench = Bench(Path(folder), 0, tokens, 0, alone=kernels == "invariant")
    fcntl.flock(turn, fcntl.LOCK_EX)  # all others have loaded, and none of them measures
    for s in sizes:
        bench.rows = s + 1
        for way, found in rounds_of(bench, groups, 1, MEASURED).items():
            row = {"kernels": kernels, "attention": ", ".join(bench.engine.attention), "s": s}
            row |= {"way": way, "tokens a second": found["tokens_per_second"]}
            row |= {"of plain": found["ratio"], "selector, ms": found["selector_ms"]}
            print(f"\n{json.dumps(row)}", flush=True)
    bench.engine.close()


if __name__ == "__main__":
    model, kernels, *numbers = sys.argv[1:]
    tokens, groups, *sizes = map(int, numbers)
    main(model, kernels, tokens, groups, sizes)
