"""The driver or one of two ranks of DP-SGD is killed in mid-training on a real Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest

from tests.integration.processes import Cluster, Runs
from tests.integration.trainings import assert_charged, started

pytestmark = pytest.mark.slow


def test_driver_killed_in_mid_training(training: Callable[..., Runs]) -> None:
    run = training()
    process = started(run)
    process.kill()
    assert run.finish(process).code < 0
    assert not (run.output / "synthetic.jsonl").exists() and not (run.output / "model").exists()
    assert_charged(run, run.run().report, 10)


def test_worker_killed_in_mid_training(training: Callable[..., Runs], cluster: Cluster) -> None:
    """The runner, and nothing else, restarts the training from the last checkpoint."""
    run = training()
    process = started(run)
    workers = cluster.workers("RayTrainWorker")
    assert len(workers) == 2
    with suppress(psutil.NoSuchProcess):
        workers[1].kill()
    assert_charged(run, run.finish(process).report, 10)
