"""Measurements of DP-SGD on the device: the clipped sum against plain gradients, ZeRO's steps
against one process', and the speed and memory of a step beside plain training and Opacus."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from multiprocessing.pool import Pool, ThreadPool
from typing import Any

import torch

from benchmarks.bench_dp_sgd import MODELS, TUNINGS, measure
from dpray.methods.dp_sgd.training.clipped_loss import PerExampleLoss
from tests.methods.dp_sgd.training.tiny_gradients import (
    clipped_sum,
    gpt2,
    llama,
    lora,
    plain_clipped_sum,
    texts,
)

Row = dict[str, Any]

CLIP_NORM = 0.7
WAYS = {
    32: ("plain training, bfloat16", "dpray, bfloat16"),
    8: ("plain training", "dpray", "Opacus ghost clipping"),
}
"""By the texts in a micro-batch; the first way is the measure of the others. A GPU is done with 8
texts in bfloat16 before Python has started the next kernel, and is busy with 32."""
SMALL_MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": gpt2,
    "llama": llama,
    "llama, lora": lambda: lora(llama()),
}


def steps(small: bool) -> Iterator[Row]:
    """Compare the sum of clipped gradients with that of plain gradients, one text at a time: the
    largest difference of a coordinate, over C. The models are small ones, `small` or not."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = texts(20)
    for name, make in SMALL_MODELS.items():
        model = make().to(device)
        plain = plain_clipped_sum(model, batch, CLIP_NORM)
        for passes in (1, 2):
            ours = clipped_sum(PerExampleLoss(model).eval(), batch, CLIP_NORM, 8, passes == 2)
            moved = float((ours - plain).abs().max()) / CLIP_NORM
            yield {"model": name, "passes": passes, "difference, of C": moved}


def speed(small: bool) -> Iterator[Row]:
    """Measure micro-batches of texts of 128 tokens. A way that fails, for want of memory perhaps,
    leaves the others'."""
    size, length = ("tiny", 16) if small else ("large", 128)
    # On a host a process's peak of memory is that of all that it ever did.
    tasks = None if small or torch.cuda.is_available() else 1
    kinds = ("llama",) if small else MODELS
    for (texts_each, ways), kind, tuning in product(WAYS.items(), kinds, TUNINGS):
        plain = 0.0
        with pool_of_one(small, tasks) as pool:
            for way in ways:
                row: Row = {"model": kind, "trained": tuning, "texts": texts_each, "way": way}
                examples = (2 if small else 6) * texts_each
                settings = (kind, tuning, way, examples, length, texts_each, size)
                try:
                    per_second, gib = pool.apply(measure, settings)
                except Exception as error:
                    yield row | {"failure": type(error).__name__}
                    continue
                plain = per_second if way == ways[0] else plain
                yield row | {
                    "examples a second": per_second,
                    "of plain": plain and per_second / plain,
                    "GiB": gib,
                }


def zero(small: bool) -> Iterator[Row]:
    """Compare four steps under DeepSpeed's ZeRO 2 and 3 with those of one process, in ranks that
    torchrun starts: one for each GPU (NCCL), or two on a host (gloo). Ray is not imported."""
    ranks = torch.cuda.device_count() or 2
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    rank = [f"--nproc-per-node={ranks}", "-m", "tests.gpu.zero_rank"]
    done = subprocess.run(torchrun + rank, stdout=subprocess.PIPE, text=True)
    yield from (json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{")
    if done.returncode:
        raise RuntimeError(f"the ranks ended with status {done.returncode}")


def pool_of_one(small: bool, tasks: int | None) -> Pool:
    """Make a process for so many tasks; small models are measured in this process."""
    if small:
        return ThreadPool(1)
    return multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=tasks)
