"""`python row_driver.py MODEL DTYPE KERNELS` prints how far a row's logits move with the rows
beside it, in nats, with vLLM's batch-invariant kernels (`invariant`) or its `ordinary` ones.

A program of its own: the kernels are chosen once in a process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main(model: str, dtype: Any, kernels: str) -> None:
    from dpray.config.sections import EngineConfig
    from dpray.engines.row_variation import row_variation
    from dpray.engines.vllm.engine import VllmEngine

    config = EngineConfig(model=model, dtype=dtype, max_num_seqs=64, kv_cache_gib=0.25)
    invariant = kernels == "invariant"
    engine = VllmEngine(config, private_rows=invariant, public_alone=invariant)
    print(f"variation {row_variation(engine, 60)} {os.environ.get('VLLM_BATCH_INVARIANT', '0')}")
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
