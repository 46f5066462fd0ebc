"""`python tensor_parallel.py MODEL`: decodes groups with the model split over two workers, and
again after one of them was killed.

Prints the tokens and the name of the error that followed, as JSON. A program of its own, because
vLLM starts its workers by running the main module again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

SIZES = [8, 0, 3]


def main() -> None:
    from dpray.config.sections import EngineConfig
    from dpray.engines.base import EngineError
    from dpray.engines.vllm.engine import VllmEngine
    from tests.engines.test_conformance import decode, make_group

    engine = VllmEngine(
        EngineConfig(model=sys.argv[1], max_num_seqs=16, kv_cache_gib=0.25, tensor_parallel_size=2)
    )
    groups = [make_group(engine, str(i), size, seed=i) for i, size in enumerate(SIZES)]
    tokens = {name: result.token_ids for name, result in decode(engine, *groups).items()}
    engine.llm.llm_engine.model_executor.workers[1].proc.kill()
    try:
        decode(engine, *groups)
    except EngineError as error:
        print(json.dumps([tokens, type(error).__name__]), flush=True)
    os._exit(0)


def tokens_of_two_ranks(model: str, **environment: str) -> tuple[dict[str, list[int]], str]:
    """Run this program; return each group's tokens, and the error after a worker's death."""
    done = subprocess.run(
        [sys.executable, __file__, model],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("["))
    tokens, error = json.loads(line)
    return tokens, error


if __name__ == "__main__":
    main()
