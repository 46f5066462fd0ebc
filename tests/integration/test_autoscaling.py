"""A cluster with no workers grows for a run, and shrinks again.

The autoscaler is Ray's own; its machines are processes of Ray's fake provider, each with a raylet.
(`ray.cluster_utils.AutoscalingCluster` starts them too, but ends every Ray on this machine first,
and reads a file that Ray's wheel lacks; so does autoscaler v2 with the provider's own name, which
is why it has the type `external` here.)
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from tests.integration.processes import (
    Cluster,
    Runs,
    family,
    ray_cluster,
    short,
    wait_for,
    workers_of,
)

pytestmark = pytest.mark.slow

HEAD = "f" * 51 + "00000"
"""Ray's fake provider takes the head to have this id."""

WIDE = {
    "runtime__actors": 2, "runtime__cpus_per_actor": 2, "runtime__gpus_per_actor": 0,
    "runtime__memory_per_actor": 0,
}  # fmt: skip
"""One on each machine. The fake provider cannot name the memory of a machine that is to come."""


NOTHING: dict[str, Any] = {
    "auth": {}, "docker": {}, "file_mounts": {}, "cluster_synced_files": [],
    "initialization_commands": [], "setup_commands": [], "head_setup_commands": [],
    "worker_setup_commands": [], "head_start_ray_commands": [], "worker_start_ray_commands": [],
}  # fmt: skip
"""Ray ends a cluster whose configuration lacks one of these."""


def machines(address: str, **types: dict[str, Any]) -> dict[str, Any]:
    """Up to two machines of two CPUs, and of each other type with these resources, which go when
    idle for six seconds."""
    provider = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
    memory = {"object_store_memory": 150_000_000}
    return {
        "cluster_name": "local",
        "max_workers": 2 * (1 + len(types)),
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 0.1,
        "provider": {
            "type": "external",
            "module": provider,
            "gcs_address": address,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "launch_multiple": True,
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {
                "resources": {"CPU": 0} | memory, "node_config": {}, "max_workers": 0,
            },
        } | {
            name: {"resources": resources | memory, "node_config": {}, "max_workers": 2}
            for name, resources in ({"worker": {"CPU": 2}} | types).items()
        },
    } | NOTHING  # fmt: skip


AUTOSCALER = {
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "AUTOSCALER_METRIC_PORT": "0",
    "RAY_FAKE_CLUSTER": "1",
    # As `ray up` and KubeRay start a head.
    "RAY_NODE_TYPE_NAME": "ray.head.default",
    "RAY_CLOUD_INSTANCE_ID": HEAD,
    "RAY_enable_autoscaler_v2": "1",
}
"""The environment of a head with the second version of the autoscaler, which is KubeRay's."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without CPUs."""
    with short() as folder, ray_cluster(folder, cpus=0, machines=machines, **AUTOSCALER) as cluster:
        yield cluster


def count(cluster: Cluster) -> int:
    """Count the machines that the autoscaler has started."""
    started = 0
    for process in family(cluster.head):
        try:
            started += process.name() == "raylet" and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
    return started - 1  # the head's


def test_a_run_brings_machines_and_each_goes_when_the_run_is_done_with_it(
    waiting_runs: Callable[..., Runs], cluster: Cluster
) -> None:
    run = waiting_runs(**WIDE, runtime__batches_per_task=1)
    assert count(cluster) == 0
    process = run.start()
    wait_for(lambda: workers_of(cluster.head, "EngineActor"), process)
    [tried] = workers_of(cluster.head, "EngineActor")
    wait_for(lambda: run.engines_waited() == 2, process)
    assert count(cluster) == 2
    # It has all CPUs of its machine, so that another one came for the reading.
    assert tried in workers_of(cluster.head, "EngineActor")
    # While one actor stands still, the other does the rest, and is not kept.
    still, _ = workers_of(cluster.head, "EngineActor")
    still.send_signal(signal.SIGSTOP)
    run.marker.touch()
    wait_for(lambda: count(cluster) == 1, process)
    still.send_signal(signal.SIGCONT)
    report = run.finish(process).report
    run.assert_whole(report)
    assert report["batches"]["repeated"] == 0
    wait_for(lambda: count(cluster) == 0)
