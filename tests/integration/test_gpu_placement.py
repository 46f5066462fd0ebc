"""Runs on a cluster that believes to have two GPUs: who gets them, who generates, what is refused.

Nothing computes on a GPU here; what Ray hands out and hides is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dpray.ledger.ledger import Ledger
from tests.integration.processes import Cluster, Runs, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(gpu_cluster: Cluster) -> Cluster:
    return gpu_cluster


@pytest.fixture
def dp_kps(runs: Callable[..., Runs], tmp_path: Path) -> Callable[..., Runs]:
    """Short texts from the terms of a few words, written by two actors."""

    def make(**changes: Any) -> Runs:
        words = tmp_path / "words.txt"
        words.write_text("\n".join(f"word{i}" for i in range(30)) + "\npatient\nnumber\n")
        run = runs(**({"runtime__actors": 2, "privacy__epsilon": 8.0} | changes))
        run.tree["method"] = {
            "name": "dp_kps", "vocabulary": str(words), "vocabulary_size": 20, "records": 60,
            "max_tokens": 16, "max_retries": 0, "estimator": "rff", "features": 50,
            "sampling": "iterative",
        }  # fmt: skip
        return run

    return make


def calls(run: Runs) -> int:
    path = run.output / "private" / "calls.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_texts_are_written_by_actors_and_one_is_killed(
    dp_kps: Callable[..., Runs], cluster: Cluster
) -> None:
    run = dp_kps().with_fault("waits")
    process = run.start()
    wait_for(lambda: 0 < calls(run) < 60, process)
    workers = cluster.workers("EngineActor")
    assert workers
    workers[0].kill()
    run.marker.touch()
    report = run.finish(process).report
    assert report["calls"]["calls"] == 60
    assert report["epsilon"] == pytest.approx(8.0, rel=1e-4)
    assert report["delta"] == run.tree["privacy"]["delta"]
    # The random model writes no text now and then.
    assert 40 < report["records"] <= 60 and len(run.synthetic()) == report["records"]
    with closing(Ledger.open(run.url)) as ledger:
        account = ledger.account("notes")
    assert account is not None
    assert sum(charge.reserved.epsilon for charge in account.charges) == pytest.approx(
        8.0, rel=1e-4
    )


def test_topics_and_aug_pe_vote_on_cpus_and_aug_pe_writes_on_gpus(
    runs: Callable[..., Runs], cluster: Cluster, tmp_path: Path
) -> None:
    """Both kinds of actors are there at a time: were the voters given the GPUs, or each kind all
    the CPUs, nothing would be written."""
    run = runs(runtime__actors=2, runtime__cpus_per_actor=2).with_fault("none")
    public = tmp_path / "public.jsonl"
    words = ("fever", "cough", "rash")
    public.write_text("".join(f'{{"text": "{word}", "label": "a"}}\n' for word in words))
    aug_pe = {
        "name": "aug_pe", "records": 6, "iterations": 2, "variations": 2, "max_tokens": 8,
        "word_var": None, "max_retries": 6,
    }  # fmt: skip
    del run.tree["method"]
    run.tree["methods"] = [{"name": "topics", "public": str(public), "topics": 3}, aug_pe]
    process = run.start()
    wait_for(lambda: cluster.workers("EngineActor") and cluster.workers("ShardActor"), process)
    report = run.finish(process).report
    assert len(run.synthetic()) == report["records"] == 6
    found = {tuple(topic["words"]) for topic in report["first"]["topics"]}
    assert found == {(word,) for word in words}


@pytest.mark.usefixtures("driver")
def test_what_has_no_room_costs_nothing(
    runs: Callable[..., Runs], cluster: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    training = {
        "method": {"name": "dp_sgd", "batch_size": 20, "max_length": 32},
        "runtime__actors": 3,
        "runtime__gpus_per_actor": 1,
    }
    run = runs(**training, output__path=str(tmp_path / "training"))
    ended = run.here(capfd, cluster.address)
    assert ended.code == 2, ended.err
    assert "runtime.gpus_per_actor" in ended.err and "needs 3 actors, 1 CPU and 1 GPU" in ended.err
    assert "which the cluster has no room for" in ended.err
    assert not Path(run.url.removeprefix("sqlite:///")).exists()
