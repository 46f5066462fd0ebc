"""`torchrun -m tests.gpu.zero_rank` makes four steps under each stage of ZeRO, on GPUs (NCCL) or on
a host (gloo), without Ray. Rank 0 prints a JSON line for each stage and model: how far its weights
are from those of the reference trainer, and the seconds that the steps took."""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from dpray.engines.float32 import without_tf32
from dpray.mechanisms.randomness import new_key
from dpray.methods.dp_sgd.training.clipped_loss import PerExampleLoss
from dpray.methods.dp_sgd.training.training import ReferenceTrainer
from dpray.methods.dp_sgd.training.zero import ZeroTrainer, shared_key
from tests.integration.zero_ranks import MODELS, STAGES, flat, plan, steps
from tests.methods.dp_sgd.training.states import weights_of

STEPS = 4


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    without_tf32()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    for stage, name in product(STAGES, MODELS):
        began = time.perf_counter()
        weights = trained(name, stage, device, ZeroTrainer)
        seconds = time.perf_counter() - began
        reference = trained(name, stage, device, ReferenceTrainer, shared_key(device))
        start = trained(name, stage, device, ReferenceTrainer, new_key(), until=0)
        row = {
            "stage": stage,
            "ranks": dist.get_world_size(),
            "backend": dist.get_backend(),
            "model": name,
            "weights moved": float((reference - start).abs().max()),
            "off the reference": float((weights - reference).abs().max()),
            "seconds": seconds,
            "with Ray": sys.modules.get("ray") is not None,
        }
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def trained(
    name: str, stage: int, device: torch.device, kind: Any, *key: str, until: int = STEPS
) -> torch.Tensor:
    """Return the weights after the steps, made almost without noise."""
    loss = PerExampleLoss(MODELS[name](), two_passes=stage == 3).eval()
    ours = plan(1e-9, stage=stage)
    trainer = kind(ours.mechanism, ours.settings, loss, *key, device)
    steps(trainer, "sgd", 0, until)
    weights = flat(weights_of(trainer)).cpu()
    if kind is ZeroTrainer:
        trainer.close()
    return weights


if __name__ == "__main__":
    main()
