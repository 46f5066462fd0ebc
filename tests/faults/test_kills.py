"""What is killed or full in mid-run, and the run that follows: the ledger never
undercounts, nothing is published twice, no private text is left behind (`Runs.finish`).

A start of a driver or an actor costs five seconds of a core, so that faults share runs, and drivers
that are not killed are this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray

from dpray.workers.failures import Kind
from dpray.workers.placement import Placement
from tests.integration.processes import Cluster, Runs, fill, small_disk_at, wait_for

pytestmark = pytest.mark.slow

MakeRuns = Callable[..., Runs]


def kill_workers(cluster: Cluster, name: str) -> None:
    workers = cluster.workers(name)
    assert workers
    for worker in workers:
        with suppress(psutil.NoSuchProcess):
            worker.kill()


def test_driver_killed_then_an_engine_and_the_accountant_killed(
    waiting_runs: MakeRuns, cluster: Cluster
):
    """All in one run on the cluster of RAY_ADDRESS. No engine that waits can end it before its
    time: only the last one's wait is over, when all that shall be killed is."""
    run = waiting_runs(runtime__batches_per_task=1)
    process = run.start()
    wait_for(lambda: run.engines_waited() and run.in_mid_batch(), process)
    process.kill()
    assert run.finish(process).code < 0
    published, at_the_first = run.counts()["published"], run.under_way()
    assert 0 < published < 12 and not (run.output / "synthetic.jsonl").exists()

    process = run.start()
    wait_for(lambda: run.engines_waited() == 2, process)
    at_the_second = run.under_way()
    kill_workers(cluster, "EngineActor")
    wait_for(lambda: run.engines_waited() == 3, process)
    # With those of earlier tests' ledgers, which nobody needs any more.
    killed = {each.pid for each in cluster.workers("Accountant")}
    kill_workers(cluster, "Accountant")
    run.marker.touch()
    report = run.finish(process).report
    accountants = {each.pid for each in cluster.workers("Accountant")}
    assert accountants and accountants.isdisjoint(killed)
    # What an actor was at when it or its driver was killed; the accountant's death costs nothing.
    lost = {unit for unit, _ in at_the_first | at_the_second}
    assert 1 <= report["batches"]["repeated"] <= len(lost) < 12
    assert report["batches"]["published"] == 12
    run.assert_whole(report)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    with small_disk_at(folder, "1m") as mounted:
        if not mounted:
            pytest.skip("this process may not mount a small disk")
        yield folder


@pytest.mark.parametrize("batches", ["disjoint", "poisson"])
def test_disk_full(
    runs: MakeRuns, small_disk: Path, batches: str, capfd: pytest.CaptureFixture[str]
):
    """What was drawn when the disk got full is published, in the room that was taken before."""
    # The driver writes, on Ray and here.
    run = runs(output__path=str(small_disk / "out"), method__batches=batches)
    # Room for run.json, the room of an attempt and some parts, and not for all of them.
    filler = fill(small_disk, (256 + 28) << 10)
    ended = run.here(capfd)
    assert ended.code == 4 and ended.err.count("\n") == 1
    assert ended.err.startswith("dpray: output.path: no space is left on its disk")
    assert not (run.output / "synthetic.jsonl").exists()
    published, starts = run.counts()["published"], run.counts()["starts"]
    assert 0 < published < 12
    filler.unlink()
    report = run.here(capfd).report
    assert report["batches"]["repeated"] <= starts - published
    run.assert_whole(report)


@pytest.mark.usefixtures("driver")
def test_engine_that_the_pool_cannot_load_and_then_one_that_raises_once(
    runs: MakeRuns,
    cluster: Cluster,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """The first costs nothing, and the run can go on. Of the task in which the second one raises,
    the finished batches are published and the others decoded again, by another actor."""
    run = runs(method__max_records=12, runtime__batches_per_task=4, runtime__max_attempts=2)
    with monkeypatch.context() as patch:
        # The actor that tried the engine is lost, so that another one has to load it.
        patch.setattr(Placement, "keep", lambda placement, actor: ray.kill(actor))
        ended = run.with_fault("loads_once").here(capfd, cluster.address)
    assert ended.code == 4 and ended.err.startswith(
        "dpray: there is no GPU here (2 times); the run "
    )
    assert run.counts()["starts"] == 0
    run.marker.unlink()
    report = run.with_fault("fails_once").here(capfd, cluster.address).report
    repeated = report["batches"]["repeated"]
    assert run.marker.exists() and 1 <= repeated <= 10
    lost_starts = {Kind.DEVICE_LOST.loss: repeated}
    assert report["repeats"]["lost_starts"] == lost_starts
    run.assert_whole(report)


@pytest.mark.usefixtures("driver")
def test_an_engine_that_a_full_machine_ended(
    runs: MakeRuns, cluster: Cluster, capfd: pytest.CaptureFixture[str]
):
    """Only what it had in hand is drawn again, by another actor, for the one charge."""
    run = runs(method__max_records=12, runtime__batches_per_task=4, runtime__actors=2)
    report = run.with_fault("full_once").here(capfd, cluster.address).report
    repeated = report["batches"]["repeated"]
    assert run.marker.exists() and 1 <= repeated <= 6, "what is left of two tasks"
    assert report["repeats"]["lost_starts"] == {Kind.MEMORY.loss: repeated}
    run.assert_whole(report)


@pytest.mark.usefixtures("driver")
def test_2000_copies_of_a_text(
    runs: MakeRuns, cluster: Cluster, records_file: Path, capfd: pytest.CaptureFixture[str]
):
    """They all belong into one batch, 25 times as many as vLLM may decode at once."""
    with open(records_file, "a") as file:
        file.writelines(['{"text": "thanks Marlowe", "label": "a"}\n'] * 2000)
    run = runs(
        engine__kind="vllm",
        engine__kv_cache_gib=0.1,
        engine__max_num_seqs=80,
        method__max_records=12,
    )
    report = run.here(capfd, cluster.address).report
    assert report["batches"]["published"] == 12 and report["batches"]["repeated"] == 0
    run.assert_whole(report)
