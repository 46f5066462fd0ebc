"""A machine of a training is to be taken away, and Ray is told so: no step is made again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.faults.trainings import attempts, held_in_mid_training
from tests.integration.processes import (
    Cluster,
    Runs,
    another_node,
    environment,
    kill,
    ray_cluster,
    short,
    wait_for,
    workers_of,
)

pytestmark = pytest.mark.slow

WATCHED = {
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "1",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5",
}

NODE = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(*(node["NodeID"] for node in ray.nodes() if node["Resources"].get("CPU") == 3))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with short() as folder, ray_cluster(folder, cpus=4, **WATCHED) as cluster:
        yield cluster


def told_of_its_end(cluster: Cluster) -> None:
    """Tell Ray, as a cloud does, that the node of three CPUs will be taken away."""
    node = run_here(sys.executable, "-c", NODE, cluster.address).strip()
    why = "--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=a spot machine"
    ray = Path(sys.executable).with_name("ray")
    deadline = "--deadline-remaining-seconds=600"
    run_here(ray, "drain-node", f"--address={cluster.address}", f"--node-id={node}", *why, deadline)


def run_here(*command: str | Path) -> str:
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended
    return ended.stdout


@pytest.mark.parametrize("least", [pytest.param(2, marks=pytest.mark.chaos), 1])
def test_a_training_goes_on_elsewhere_after_a_notice(
    training: Callable[..., Runs], cluster: Cluster, tmp_path: Path, least: int
) -> None:
    """Two ranks of three CPUs do not both fit the head. It goes on with two on another machine, or
    with one if that is enough and no other machine comes. That it waits for two is in
    `test_admission` too."""
    run = training(runtime__cpus_per_actor=3, runtime__min_ranks=least)
    with another_node(cluster, tmp_path / "first.out") as node:
        process = run.start(**WATCHED)
        with held_in_mid_training(run, process, cluster.head, node):
            assert workers_of(node, "RayTrainWorker")
            told_of_its_end(cluster)
            wait_for(lambda: was_noticed(cluster), process)
        wait_for(lambda: not workers_of(node, "RayTrainWorker"), process)
        kill(node)
        second = another_node(cluster, tmp_path / "second.out") if least == 2 else nullcontext()
        with second:
            report = run.finish(process).report
    assert report["steps"] == {"planned": 30, "repeated": 0, "charged": 30}
    published, unfinished = attempts(run)
    assert len(published) == 1 and not unfinished


def was_noticed(cluster: Cluster) -> bool:
    """Return whether Ray Train has told the ranks, which stand still, of the notice."""
    return any(
        "PreemptionWatcher: preemption detected" in log.read_text(errors="replace")
        for log in cluster.logs()
    )
