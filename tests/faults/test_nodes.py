"""A cluster of two nodes of which one is lost in mid-run.

Two actors of three CPUs do not both fit the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    """The runner, and nothing else, restarts the training from the last checkpoint. The suite has
    `test_a_worker_lost_in_mid_training` and `test_node_lost_in_mid_batch`."""
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


@pytest.mark.parametrize("lost", ["TrainController", "SynchronizationActor"])
def test_an_actor_of_ray_train_lost_in_mid_training(
    training: Callable[..., Runs], cluster: Cluster, lost: str
) -> None:
    """The ranks of the next attempt get the room of the last ones. This cluster, with room for no
    other rank, has no dashboard, without which Ray Train leaves a lost controller's group."""
    run = training(runtime__actors=1, runtime__cpus_per_actor=3)
    process = run.start()
    with held_in_mid_training(run, process, cluster.head):
        [actor] = cluster.workers(lost)
        actor.kill()
    assert_charged(run, run.finish(process).report, faults=1)
