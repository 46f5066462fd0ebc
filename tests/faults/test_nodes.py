"""A cluster of two nodes of which one is lost in mid-run.

Two actors of three CPUs do not both fit the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults.trainings import assert_charged, held_in_mid_training
from tests.integration.processes import (
    Cluster,
    Runs,
    another_node,
    kill,
    ray_cluster,
    short,
    wait_for,
    workers_of,
)

pytestmark = pytest.mark.slow

WIDE = {"runtime__actors": 2, "runtime__cpus_per_actor": 3}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Of its own: the other tests' has no dead nodes. This one's head notes a lost node in three
    seconds, not in fifteen."""
    settings = {"cpus": 4, "RAY_health_check_period_ms": "500"}
    with short() as folder, ray_cluster(folder, **settings) as cluster:
        yield cluster


def test_node_lost_in_mid_batch(
    waiting_runs: Callable[..., Runs], cluster: Cluster, tmp_path: Path
) -> None:
    """The actor on the head does what is left."""
    # Twelve tasks: a few are queued for the actor that is there first, and the other one needs two.
    run = waiting_runs(**WIDE, runtime__batches_per_task=1)
    with another_node(cluster, tmp_path / "first.out") as node:
        process = run.start()
        wait_for(lambda: run.engines_waited() == 2, process)
        assert workers_of(node, "EngineActor")
        kill(node)
        run.marker.touch()
        report = run.finish(process).report
    assert 1 <= report["batches"]["repeated"] < 12
    run.assert_whole(report)


@pytest.mark.chaos
def test_driver_then_a_worker_then_a_node_lost_in_mid_training(
    training: Callable[..., Runs], cluster: Cluster, tmp_path: Path
) -> None:
    """The suite has a worker of a training lost below, and a node in mid-batch above."""
    run = training(**WIDE)
    with another_node(cluster, tmp_path / "first.out") as node:
        process = run.start()
        with held_in_mid_training(run, process, cluster.head, node):
            process.kill()
            assert run.finish(process).code < 0
        assert not (run.output / "synthetic.jsonl").exists() and not (run.output / "model").exists()

        process = run.start()
        with held_in_mid_training(run, process, cluster.head, node):
            [worker] = cluster.workers("RayTrainWorker")
            worker.kill()
        with held_in_mid_training(run, process, cluster.head, node):
            assert workers_of(node, "RayTrainWorker")
            kill(node)
        with another_node(cluster, tmp_path / "second.out"):
            assert_charged(run, run.finish(process).report, faults=3)


@pytest.mark.usefixtures("driver")
def test_a_worker_and_each_actor_of_ray_train_lost_in_mid_training(
    training: Callable[..., Runs], cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    """The runner, and nothing else, restarts the training from the last checkpoint. The ranks of
    the next attempt get the room of the last ones: this cluster, with room for no other rank, has
    no dashboard, without which Ray Train leaves a lost controller's group."""
    lost = ("RayTrainWorker", "SynchronizationActor", "TrainController")
    keys = {"runtime__actors": 1, "runtime__cpus_per_actor": 3}
    run = training(**keys, runtime__max_attempts=len(lost) + 1)

    def kill_each() -> None:
        for name in lost:
            with held_in_mid_training(run, None, cluster.head):
                [actor] = cluster.workers(name)
                actor.kill()

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill_each)
        report = run.here(capfd, cluster.address).report
    killed.result()
    assert_charged(run, report, faults=len(lost), least=5 * len(lost))
