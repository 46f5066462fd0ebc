"""The Ray cluster of the tests that need one, and this process as a driver on it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

TOKEN = uuid.uuid4().hex
"""The tests' clusters alone take it: they are not open to everybody, and need no token of this
account."""

OF_RAY = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": TOKEN,
    # One process less for each training; it looks for notices of a cloud.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # Ray Train sees a rank's end after two seconds otherwise.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
}
"""The environment of a driver: of this process, and of those that it starts."""

# Ray reads them once in a process, so that they are there before any test imports it.
os.environ |= OF_RAY


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """One cluster for all files of a pytest process, started the way an operator starts one."""
    from tests.integration.processes import ray_cluster, short

    # Its processes report to the metrics pages every five seconds, not every ten. Ray drops a gauge
    # that was not set for twice as long, and dpray sets its gauges every five seconds.
    variables: dict[str, Any] = {"RAY_metrics_report_interval_ms": "5000"}
    with short() as folder, ray_cluster(folder, jobs=True, **variables) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def gpu_cluster() -> Iterator[Any]:
    """One that believes to have two GPUs. Nothing computes on them; what Ray hands out and hides is
    the same."""
    from tests.integration.processes import ray_cluster, short

    with short() as folder, ray_cluster(folder, cpus=4, gpus=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def driver(cluster: Any) -> Iterator[None]:
    """This process is a driver on the cluster until the end of the file: it has loaded its
    libraries, and Ray's workers that are done with a task are kept for the next test's."""
    import ray

    from dpray.workers.cluster import start_ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster.address)
        start_ray(None)
        yield
        ray.shutdown()
