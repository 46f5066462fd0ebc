"""`train_on_ray` trains on the ranks of a Ray Train worker group.

Ray retries nothing here: a repeated step would be a second, uncharged release of the same data. The
caller decides what is repeated, and charges it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
from ray.exceptions import RayActorError, WorkerCrashedError
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.constants import WORKER_GROUP_START_TIMEOUT_S_ENV_VAR
from ray.train.v2._internal.exceptions import (
    InsufficientClusterResourcesError,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
)
from ray.train.v2.api.exceptions import PreemptionError, TrainingFailedError, WorkerGroupError

from dpray.mechanisms.randomness import generator
from dpray.methods.dp_sgd.training.clipped_loss import PerExampleLoss
from dpray.methods.dp_sgd.training.training import Training, train
from dpray.methods.dp_sgd.training.zero import ZeroTrainer, loading, shared_key
from dpray.types import DprayError, Resumable
from dpray.workers.engine import NO_GPU
from dpray.workers.failures import Kind, find_error, kind_of
from dpray.workers.ray_groups import groups_of, remove_by_id
from dpray.workers.rows import without_words

# Ray Train v2's arguments; type checkers see v1's.
_NO_RETRIES = ray.train.FailureConfig(
    max_failures=0,
    controller_failure_limit=0,  # type: ignore[call-arg]
    max_preemption_failures=0,
)


def train_on_ray(
    training: Training,
    workers: int,
    scratch: str,
    gpus_per_worker: float = 0.0,
    cpus_per_worker: float = 1.0,
    memory_per_worker: float = 0.0,
    wait: float = 3600.0,
) -> None:
    """Fine-tune on `workers` ranks; returns when the model is in `training.folder`, or earlier,
    with a checkpoint, if a machine will be taken away.

    `scratch` is a folder for Ray Train's own files, on storage that all nodes share. Raises what a
    rank raised, Ray's error if a worker was lost, and Resumable if the cluster has no room for
    `wait` seconds.
    """
    # No argument of Ray Train sets this.
    os.environ[WORKER_GROUP_START_TIMEOUT_S_ENV_VAR] = str(wait)
    ranks = scaling(workers, gpus_per_worker, cpus_per_worker, memory_per_worker)
    bundles = [resources(gpus_per_worker, cpus_per_worker, memory_per_worker)] * workers
    trainer = TorchTrainer(
        _rank,
        train_loop_config={"training": training},
        scaling_config=ranks,
        run_config=ray.train.RunConfig(
            storage_path=str(Path(scratch).resolve()),
            failure_config=_NO_RETRIES,
            # Ray Train looks at the GPUs before `_rank` begins, so they are hidden before.
            worker_runtime_env={} if gpus_per_worker else {"env_vars": NO_GPU},  # type: ignore[call-arg]
        ),
    )
    before = groups_of(bundles)
    try:
        trainer.fit()
    except TrainingFailedError as error:
        raise reason(error) from error
    except RayActorError:
        # The group of a lost controller would stay, and the next one's would wait for its room. Ray
        # Train's cleaner of groups needs the dashboard, which may not be there.
        remove_by_id(groups_of(bundles) - before)
        raise


def scaling(workers: int, gpus: float, cpus: float, memory: float) -> ray.train.ScalingConfig:
    """Return the resources of the ranks: `gpus`, `cpus` and bytes of memory each."""
    return ray.train.ScalingConfig(
        num_workers=workers, use_gpu=gpus > 0, resources_per_worker=resources(gpus, cpus, memory)
    )


def resources(gpus: float, cpus: float, memory: float) -> dict[str, float]:
    named = {"CPU": cpus, "GPU": gpus, "memory": memory}
    return {name: amount for name, amount in named.items() if amount or name == "CPU"}


def reason(error: TrainingFailedError) -> BaseException:
    """Return the first cause: a DprayError of a rank, else the loss of a worker. The other ranks
    have errors too, because they miss it."""
    if isinstance(error, PreemptionError):
        return WorkerCrashedError()
    failures = list(_failures(error))
    for failure in failures:
        # None of these is the mechanism's: no rank has begun.
        if isinstance(failure, WorkerGroupStartupFailedError):
            return WorkerCrashedError()
        if isinstance(failure, WorkerGroupStartupTimeoutError | InsufficientClusterResourcesError):
            return Resumable(
                "the cluster has no room: the run waits for the ranks of the training, none of "
                "which began (runtime.wait, actors, cpus_per_actor, gpus_per_actor); make room, or "
                "wait longer"
            )
        if (ours := find_error(failure, DprayError)) is not None:
            return ours
    kinds = {kind_of(failure): failure for failure in reversed(failures)}
    return kinds.get(Kind.MEMORY) or kinds.get(Kind.LOST) or failures[0]


def _failures(error: TrainingFailedError) -> Iterator[BaseException]:
    """Yield the ranks' errors, out of Ray Train's wrappers, or its own."""
    found = error.worker_failures.values() if isinstance(error, WorkerGroupError) else [error]
    for failure in found:
        controller = getattr(failure, "controller_failure", failure)
        health = getattr(controller, "health_check_failure", controller)
        yield getattr(health, "_base_exc", health)


class RayTrainer(ZeroTrainer):
    """A rank's trainer that Ray Train tells of a machine that will be taken away."""

    def has_notice(self) -> bool:
        return ray.train.get_preemption_info() is not None


def _rank(config: dict[str, Any]) -> None:
    training: Training = config["training"]
    method = training.method
    device = ray.train.torch.get_device()

    def make_trainer(loss: PerExampleLoss) -> RayTrainer:
        return RayTrainer(method.mechanism, method.settings, loss, device)

    sampling = generator(shared_key(device))
    with without_words():
        in_parts = loading(method.settings.zero_stage)
        train(training, make_trainer, sampling, loading=in_parts).close()
