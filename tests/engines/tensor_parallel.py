"""`python tensor_parallel.py MODEL TENSOR PIPELINE`: decodes groups with the model split over two
workers, within its layers or between them, and again after one of them was killed.

Prints the tokens and the name of the error that followed, as JSON. A program of its own, because
vLLM starts its workers by running the main module again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

SIZES = [8, 0, 3]


def give_stages_their_buffer() -> None:
    """vLLM's CPU build makes no buffer for what a stage gets from the one before it; on a GPU a
    trial run does. The workers run this too."""
    from dpray.engines.vllm.lockstep import LockstepWorker

    start = LockstepWorker.lockstep_start

    def started(worker: LockstepWorker, *arguments: Any) -> dict[str, Any]:
        runner = worker.model_runner
        if runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                runner.max_num_tokens, runner.model_config.dtype, runner.device
            )
        return start(worker, *arguments)

    LockstepWorker.lockstep_start = started  # type: ignore[method-assign]


def main() -> None:
    from dpray.config.sections import EngineConfig
    from dpray.engines.base import EngineError
    from dpray.engines.vllm.engine import VllmEngine
    from tests.engines.test_conformance import decode, make_group

    model, tensor, pipeline = sys.argv[1:]
    engine = VllmEngine(
        EngineConfig(
            model=model,
            max_num_seqs=16,
            kv_cache_gib=0.25,
            tensor_parallel_size=int(tensor),
            pipeline_parallel_size=int(pipeline),
        )
    )
    groups = [make_group(engine, str(i), size, seed=i) for i, size in enumerate(SIZES)]
    tokens = {name: result.token_ids for name, result in decode(engine, *groups).items()}
    engine.llm.llm_engine.model_executor.workers[1].proc.kill()
    try:
        decode(engine, *groups)
    except EngineError as error:
        print(json.dumps([tokens, type(error).__name__]), flush=True)
    os._exit(0)


def tokens_of_two_ranks(
    model: str, tensor: int = 2, pipeline: int = 1, **environment: str
) -> tuple[dict[str, list[int]], str]:
    """Run this program; return each group's tokens, and the error after a worker's death."""
    done = subprocess.run(
        [sys.executable, __file__, model, str(tensor), str(pipeline)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("["))
    tokens, error = json.loads(line)
    return tokens, error


if __name__ in ("__main__", "__mp_main__") and sys.argv[3] != "1":
    give_stages_their_buffer()

if __name__ == "__main__":
    main()
