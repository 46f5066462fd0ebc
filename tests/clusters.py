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

# Ray reads them once in a process, so that they are there before any test imports it. A training
# has one process less without Ray Train's watcher, which looks for notices of a cloud.
os.environ |= {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": TOKEN,
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """One cluster for all files of a pytest process, started the way an operator starts one."""
    from tests.integration.processes import ray_cluster, short

    # Its processes report to the metrics pages every five seconds, not every ten.
    variables: dict[str, Any] = {"RAY_metrics_report_interval_ms": "5000"}
    with short() as folder, ray_cluster(folder, jobs=True, **variables) as cluster:
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
