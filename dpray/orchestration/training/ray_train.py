"""DP-SGD on the ranks of a Ray Train worker group.

Ray retries nothing here: a step that is made again would be a second release of the same data that
nobody paid for. The caller decides, and charges, what is run again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
from ray.train.torch import TorchTrainer

from dpray.mechanisms.randomness import generator
from dpray.methods.dp_sgd import DpSgd, Units, fine_tune
from dpray.orchestration.training.model import Tuning, load_loss, save_model
from dpray.orchestration.training.zero import ZeroTrainer, shared_key

# Ray Train v2's; type checkers see v1's.
_NO_RETRIES = ray.train.FailureConfig(
    max_failures=0,
    controller_failure_limit=0,  # type: ignore[call-arg]
    max_preemption_failures=0,
)


def _nothing(t: int) -> None:
    pass


@dataclass(frozen=True)
class Training:
    """What every rank is told; it is pickled, and holds no private data.

    `load_units` gives the private data, the same on every rank, in the same order. `before_step` is
    called on rank 0 with each step's number before that step draws anything. Rank 0 writes the
    model to `folder`, which has to be reachable from its node.
    """

    plan: DpSgd
    tuning: Tuning
    zero_stage: int
    load_units: Callable[[], Units] = field(repr=False)
    folder: str
    before_step: Callable[[int], None] = field(default=_nothing, repr=False)


def train_on_ray(
    training: Training,
    workers: int,
    scratch: str,
    use_gpu: bool = False,
    cpus_per_worker: float = 1.0,
) -> None:
    """Fine-tune on `workers` ranks; returns when the model is in `training.folder`.

    `scratch` is a folder for Ray Train's own files, on storage that all nodes share where there is
    more than one. Raises Ray's error where a worker raised or was lost.
    """
    TorchTrainer(
        _rank,
        train_loop_config={"training": training},
        scaling_config=ray.train.ScalingConfig(
            num_workers=workers, use_gpu=use_gpu, resources_per_worker={"CPU": cpus_per_worker}
        ),
        run_config=ray.train.RunConfig(
            storage_path=str(Path(scratch).resolve()),
            failure_config=_NO_RETRIES,
        ),
    ).fit()


def _rank(config: dict[str, Any]) -> None:
    training: Training = config["training"]
    device = ray.train.torch.get_device()
    loss = load_loss(training.tuning).to(device)
    trainer = ZeroTrainer(training.plan, loss, training.zero_stage, device)
    before_step = training.before_step if trainer.rank == 0 else _nothing
    sampling = generator(shared_key(device))
    fine_tune(training.plan, training.load_units(), trainer, sampling, before_step)
    weights = trainer.weights()
    if trainer.rank == 0:
        save_model(training.tuning, weights, Path(training.folder))
    trainer.close()
