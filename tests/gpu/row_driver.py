"""`python row_driver.py MODEL DTYPE KERNELS` prints a JSON line: how far a row's logits move with
the rows beside it, in nats, and in how many seconds a start finds it out. `KERNELS` are vLLM's
batch-invariant ones (`invariant`), `FlashAttention 3` among them, which dpray refuses, or its
`ordinary` ones.

A program of its own: the kernels are chosen once in a process. Others load at the same time, which
the seconds show.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

ROWS, LONGEST = 60, 400


def main(folder: str, dtype: Any, kernels: str) -> None:
    from dpray.config.sections import EngineConfig
    from dpray.engines.row_variation import row_variation
    from dpray.engines.vllm import engine, model
    from tests.gpu.lockstep_driver import share_gpu

    share_gpu()
    if kernels == "FlashAttention 3":
        model.invariant_attention = lambda: {"flash_attn_version": 3}
        model.refuse_other_kernels = lambda ranks: None
    exact = kernels != "ordinary"
    config = EngineConfig(model=folder, dtype=dtype, max_num_seqs=64, kv_cache_gib=0.25)
    began = time.perf_counter()
    loaded = engine.VllmEngine(config, private_rows=exact, public_alone=exact)
    ready = time.perf_counter()
    moved = row_variation(loaded, ROWS, LONGEST)
    found = {
        "dtype": dtype,
        "kernels": kernels,
        "attention": ", ".join(loaded.attention),
        "invariant": os.environ.get("VLLM_BATCH_INVARIANT") == "1",
        "logits moved, nats": moved,
        "seconds": time.perf_counter() - ready,
        "seconds to load": ready - began,
    }
    print(f"\n{json.dumps(found)}", flush=True)
    loaded.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
