"""Runs on a cluster of two CPUs, which has room for less than they ask for: each has its place
before it is charged, takes what there is, and leaves the rest to the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dpray.ledger.ledger import Ledger
from dpray.methods import registry as methods
from dpray.methods.config import load_config
from dpray.methods.registry import make_plan
from dpray.types import Budget, Progress, Resumable
from dpray.workers.placement import placed, run_placement
from tests.faults.driver import build
from tests.integration.processes import Cluster, Runs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("driver")]

AUG_PE = {
    "name": "aug_pe", "records": 6, "iterations": 2, "variations": 2, "max_tokens": 8,
    "word_var": None, "max_retries": 6,
}  # fmt: skip


def has_ledger(run: Runs) -> bool:
    return Path(run.url.removeprefix("sqlite:///")).exists()


def assert_charged_once(run: Runs) -> None:
    with closing(Ledger.open(run.url)) as ledger:
        account = ledger.account("notes")
    assert account is not None and len(account.charges) == 1


@pytest.fixture
def several(runs: Callable[..., Runs], tmp_path: Path) -> Callable[..., list[Runs]]:
    """Runs that share the cluster and nothing else."""

    def make(number: int, **changes: Any) -> list[Runs]:
        return [
            runs(
                output__path=str(tmp_path / f"out-{i}"),
                **({"privacy__ledger": f"sqlite:///{tmp_path}/ledger-{i}.db"} | changes),
            ).with_fault("none")
            for i in range(number)
        ]

    return make


@contextmanager
def taken(cpus: int) -> Iterator[None]:
    """Somebody else has so many CPUs of the cluster."""
    import ray

    class Somebody:
        def is_there(self) -> bool:
            return True

    somebody: Any = ray.remote(num_cpus=cpus)(Somebody).remote()
    assert ray.get(somebody.is_there.remote())
    yield
    ray.kill(somebody)


@pytest.fixture
def full(cluster: Cluster) -> Iterator[None]:
    with taken(2):
        yield


def test_dp_kps_counts_with_the_shards_that_have_room(
    runs: Callable[..., Runs], cluster: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = tmp_path / "words.txt"
    words.write_text("\n".join(f"word{i}" for i in range(30)) + "\npatient\nnumber\n")
    run = runs(runtime__actors=4, privacy__epsilon=8.0)
    run.tree["engine"] = {"kind": "none"}
    run.tree["method"] = {
        "name": "dp_kps", "vocabulary": str(words), "vocabulary_size": 20, "records": 60,
        "estimator": "exact",
    }  # fmt: skip
    assert run.here(capfd, cluster.address).report["records"] == 60
    assert_charged_once(run)


def test_two_runs_of_aug_pe_share_a_cluster(
    several: Callable[..., list[Runs]], cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each would take four CPUs, and has room for a voter and an engine."""
    keys = {"runtime__actors": 4, "runtime__memory_per_actor": 0.25}
    first, second = several(2, method=AUG_PE, **keys)
    assert_share(first, second, cluster, capfd)
    for run in (first, second):
        assert len(run.synthetic()) == 6
        assert_charged_once(run)


def test_a_run_waits_for_another_one_that_has_the_cluster(
    several: Callable[..., list[Runs]], cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each would take both CPUs. Eight are in the storm."""
    keys = {"runtime__cpus_per_actor": 2, "runtime__memory_per_actor": 0.25}
    first, second = several(2, method__max_records=12, **keys)
    for run, report in zip(
        (first, second), assert_share(first, second, cluster, capfd), strict=True
    ):
        run.assert_whole(report)


def assert_share(
    first: Runs, second: Runs, cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> list[dict[str, Any]]:
    """Both are done at the same time, one of them in this process. Return their reports."""
    process = first.start()
    report = second.here(capfd, cluster.address).report
    return [first.finish(process).report, report]


def test_a_training_begins_with_the_ranks_that_have_room_and_never_with_fewer_than_it_may(
    runs: Callable[..., Runs],
) -> None:
    """`make chaos` has it go on with all of its ranks on another machine."""

    def ranks(actors: int, least: int, lost: int = 0) -> int:
        keys = {"runtime__actors": actors, "runtime__min_ranks": least, "runtime__wait": 2}
        method = {"name": "dp_sgd", "batch_size": 20, "max_length": 32}
        run = runs(method=method, runtime__memory_per_actor=0.25, **keys)
        config = load_config(str(run.config), [])
        with placed(config, lambda progress: None, is_new=True), ExitStack() as others:
            if lost:  # with a machine, after the run had its place
                run_placement().give_back()
                others.enter_context(taken(lost))
            return run_placement().ranks(config)

    assert ranks(4, 1) == ranks(2, 2) == 2
    assert (ranks(2, 1, lost=1), ranks(2, 2, lost=1)) == (1, 2), "Ray Train waits for the second"
    with taken(1):
        assert ranks(2, 1) == 1
        with pytest.raises(Resumable, match="waits for 1 of 2 actors"):
            ranks(2, 2)


@pytest.mark.chaos
def test_a_storm_of_submissions_with_one_budget(
    several: Callable[..., list[Runs]], tmp_path: Path
) -> None:
    """Eight runs that each take the whole cluster, and a budget for five of them."""
    url = f"sqlite:///{tmp_path}/shared.db"
    keys = {"privacy__ledger": url, "runtime__cpus_per_actor": 2, "method__max_records": 4}
    storm = several(8, **keys)
    price = make_plan(load_config(str(storm[0].config), [])).cost
    with closing(Ledger.create_or_open(url)) as ledger:
        budget = Budget(5.5 * price.epsilon, 5.5 * price.delta)
        ledger.create_dataset("notes", budget, "record", "add_or_remove_one")
    processes = [run.start() for run in storm]
    ended = [run.finish(process) for run, process in zip(storm, processes, strict=True)]
    assert Counter(each.code for each in ended) == {0: 5, 3: 3}, [each.err for each in ended]
    with closing(Ledger.open(url)) as ledger:
        account = ledger.account("notes")
        assert account is not None and len(account.charges) == 5 and ledger.verify() == []
    for run, each in zip(storm, ended, strict=True):
        assert (run.output / "synthetic.jsonl").exists() == (each.code == 0)


@pytest.mark.parametrize(
    ("key", "amount", "words"),
    [
        ("cpus_per_actor", 3, "1 actor, 3 CPUs and 0.875 GiB"),
        ("memory_per_actor", 2**20, "1 actor, 1 CPU and 1,048,576 GiB"),
    ],
)
def test_more_than_the_cluster_has_is_refused(
    runs: Callable[..., Runs],
    cluster: Cluster,
    capfd: pytest.CaptureFixture[str],
    key: str,
    amount: int,
    words: str,
) -> None:
    run = runs(**{f"runtime__{key}": amount}).with_fault("none")
    ended = run.here(capfd, cluster.address)
    assert ended.code == 2, ended.err
    assert f"runtime.{key}" in ended.err and words in ended.err
    assert "nothing was charged" in ended.err
    assert not has_ledger(run)


@pytest.mark.usefixtures("full")
def test_ctrl_c_ends_a_wait_and_costs_nothing(
    several: Callable[..., list[Runs]], cluster: Cluster
) -> None:
    from ray.util.placement_group import placement_group_table

    (run,) = several(1, method=AUG_PE)
    config = load_config(str(run.config), [f"runtime.ray_address={cluster.address}"])

    def interrupted(progress: Progress) -> None:
        if progress.activity == "waiting for room":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        methods.run(config, interrupted, partial(build, "none", str(run.marker)))
    assert not has_ledger(run)
    states = {group["state"] for group in placement_group_table().values()}
    assert states == {"REMOVED"}, "a group that waits would take what the next run needs"


@pytest.mark.usefixtures("full")
def test_a_wait_ends_and_costs_nothing(
    several: Callable[..., list[Runs]], cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    (run,) = several(1, method=AUG_PE, runtime__wait=2)
    ended = run.here(capfd, cluster.address)
    assert ended.code == 4, ended.err
    assert "waits for 2 of 2 actors: 1 of 0.5 CPU and 0.875 GiB" in ended.err
    assert "runtime.wait" in ended.err
    assert "nothing was charged" in ended.err
    assert not has_ledger(run)
