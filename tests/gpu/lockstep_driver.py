"""`python lockstep_driver.py MODEL KERNELS TOKENS GROUPS SIZE...` prints JSON lines, each of a way:
private decoding in vLLM, beside plain sampling of the same requests, in groups of SIZE private rows
and a public one.
`KERNELS` are vLLM's batch-`invariant` ones, or its `ordinary` ones.

A program of its own: the kernels are chosen once in a process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

MEASURED = ["plain", "recentred", "dclip", "dclip, top_k_plus"]


def main(folder: str, kernels: str, tokens: int, groups: int, sizes: list[int]) -> None:
    from benchmarks.bench_lockstep import Bench, rounds_of

    bench = Bench(Path(folder), 0, tokens, 0, alone=kernels == "invariant")
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
