"""`python tensor_parallel.py MODEL TENSOR,PIPELINE...`: decodes groups with the model split over
two workers, within its layers or between them, and again after one of them was killed.

Prints a line of JSON for each split: the tokens, and the name of the error that followed. A program
of its own, whose processes are forks of one that has imported vLLM.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

SIZES = [8, 0, 3]

Split = tuple[int, int]
"""The ranks of each stage, and the stages."""


def give_stages_their_buffer() -> None:
    """vLLM's CPU build makes no buffer for what a stage gets from the one before it; on a GPU a
    trial run does."""
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


def decode_split(model: str, tensor: int, pipeline: int) -> None:
    from dpray.config.sections import EngineConfig
    from dpray.engines.base import EngineError
    from dpray.engines.vllm.engine import VllmEngine
    from tests.engines.test_conformance import decode, make_group

    if pipeline > 1:
        give_stages_their_buffer()
    engine = VllmEngine(
        EngineConfig(
            model=model,
            max_num_seqs=16,
            kv_cache_gib=0.25,
            tensor_parallel_size=tensor,
            pipeline_parallel_size=pipeline,
        )
    )
    groups = [make_group(engine, str(i), size, seed=i) for i, size in enumerate(SIZES)]
    tokens = {name: result.token_ids for name, result in decode(engine, *groups).items()}
    executor = engine.llm.llm_engine.model_executor
    executor.workers[1].proc.kill()
    until = time.monotonic() + 60
    while not executor.is_failed and time.monotonic() < until:  # vLLM's monitor is a thread
        time.sleep(0.01)
    try:
        decode(engine, *groups)
    except EngineError as error:
        print(json.dumps([tokens, type(error).__name__]), flush=True)


def main(model: str, *splits: str) -> None:
    from dpray.engines.vllm.model import _import_vllm

    vllm = _import_vllm()
    for part in ("entrypoints.llm", "v1.worker.gpu_model_runner", "v1.executor.multiproc_executor"):
        module = import_module(f"vllm.{part}")
    if vllm.platforms.current_platform.is_cpu():
        module.get_mp_context = partial(multiprocessing.get_context, "fork")  # type: ignore[attr-defined]
    for split in splits:
        child = os.fork()
        if child == 0:
            try:
                decode_split(model, *map(int, split.split(",")))
            finally:
                os._exit(0)  # a worker is dead: nothing ends in order
        os.waitpid(child, 0)


def tokens_of_two_ranks(
    model: str, *splits: Split, **environment: str
) -> list[tuple[dict[str, list[int]], str]]:
    """Run this program; return for each split the groups' tokens, and the error after a worker's
    death."""
    done = subprocess.run(
        [sys.executable, __file__, model, *(f"{tensor},{stages}" for tensor, stages in splits)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[{")]
    assert len(found) == len(splits), done.stderr[-2000:]
    return [(tokens, error) for tokens, error in found]


if __name__ == "__main__":
    main(*sys.argv[1:])
