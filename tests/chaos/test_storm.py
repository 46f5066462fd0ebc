"""Every method on a cluster of three nodes on which things fail at random times (`make chaos`).

What fails and when follows from the method and the round's number; `CHAOS_ROUNDS` says how many
rounds, and out/chaos.jsonl keeps the story of each. The ledger of an even round is SQLite, that of
an odd one PostgreSQL. Whatever happened, the release is whole, each unit is published once, the
ledger counts at least what was executed, a recount finds no fault, and no private word is anywhere
but in the data.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from dpray.ledger.ledger import Ledger
from tests.chaos.kept import NUMBERS, database_of, keep
from tests.chaos.recount import recount
from tests.chaos.rehearsed import make_budget
from tests.databases import new_schema
from tests.engines.api_server import running_server
from tests.faults.trainings import assert_charged
from tests.integration.processes import (
    Cluster,
    Ended,
    Runs,
    another_node,
    kill,
    ray_cluster,
    short,
    small_disk_at,
    workers_of,
)
from tests.integration.test_aug_pe_ray import AUG_PE, assert_once

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(3600)]

MOST_FAULTS = 6
"""So many things fail in a round, if it lasts so long."""

PAUSE = 4.0
"""Seconds between faults, on the average."""

MOST_STARTS = 15
"""A run that is not done after so many starts never will be."""

ACTORS = ("ShardActor", "EngineActor", "RayTrainWorker")


class Nodes:
    """A head and two other nodes, in whose places new ones come."""

    def __init__(self, cluster: Cluster, folder: Path, **variables: str) -> None:
        self.cluster, self.folder, self.variables = cluster, folder, variables
        self.started = 0
        self.others: list[tuple[ExitStack, subprocess.Popen[bytes]]] = []
        for _ in range(2):
            self.add()

    def add(self, tries: int = 3) -> None:
        """Start a node; a busy machine may not start it in Ray's time."""
        self.started += 1
        stack = ExitStack()
        out = self.folder / f"node-{self.started}.out"
        try:
            node = stack.enter_context(another_node(self.cluster, out, **self.variables))
            self.others.append((stack, node))
        except AssertionError:
            if tries == 1:
                raise
            self.add(tries - 1)

    def end_one(self, rng: random.Random) -> None:
        stack, node = self.others.pop(rng.randrange(len(self.others)))
        kill(node)
        stack.close()

    def workers(self, *names: str) -> list[psutil.Process]:
        every = [self.cluster.head, *(node for _, node in self.others)]
        return [worker for node in every for name in names for worker in workers_of(node, name)]

    def close(self) -> None:
        for stack, _ in self.others:
            stack.close()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    settings = {"cpus": 2, "RAY_health_check_period_ms": "500"}
    with short() as folder, ray_cluster(folder, **settings) as cluster:
        nodes = Nodes(cluster, folder)
        yield nodes
        nodes.close()


@pytest.fixture
def cluster(nodes: Nodes) -> Cluster:
    """The one of the fixtures `runs` and `training`."""
    return nodes.cluster


class Storm:
    """Starts a run again and again until it is done, and breaks something now and then."""

    def __init__(self, run: Runs, nodes: Nodes, seed: str) -> None:
        self.run, self.nodes, self.rng = run, nodes, random.Random(seed)
        self.story: list[str] = []
        self.filler = run.output.parent / "filler"
        self.faults: dict[str, Callable[[subprocess.Popen[str]], None]] = {
            "driver": lambda driver: driver.kill(),
            "actor": lambda driver: self._kill(*ACTORS),
            "accountant": lambda driver: self._kill("Accountant"),
            "node": lambda driver: self._replace_node(),
            "database": lambda driver: self._lock_database(),
        }
        if os.path.ismount(run.output.parent):
            self.faults["disk"] = self._fill_disk

    def _kill(self, *names: str) -> None:
        if workers := self.nodes.workers(*names):
            with suppress(psutil.NoSuchProcess):
                self.rng.choice(workers).kill()

    def _replace_node(self) -> None:
        self.nodes.end_one(self.rng)
        self.nodes.add()

    def _lock_database(self) -> None:
        """Let nobody write to the ledger for three seconds; on PostgreSQL all connections are lost
        before that."""
        if not self.run.url.startswith("sqlite"):
            with psycopg.connect(self.run.url) as connection, suppress(psycopg.OperationalError):
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
                )
                connection.execute("LOCK TABLE dpray_entries")
                time.sleep(3.0)
            return
        file = self.run.url.removeprefix("sqlite:///")
        with closing(sqlite3.connect(file)) as database, suppress(sqlite3.OperationalError):
            database.execute("BEGIN EXCLUSIVE")
            time.sleep(3.0)
            database.rollback()

    def _fill_disk(self, driver: subprocess.Popen[str]) -> None:
        """Until the driver ends of it, or for five seconds."""
        with suppress(OSError), open(self.filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        deadline = time.monotonic() + 5.0
        while driver.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        self.filler.unlink()

    def weather(self) -> dict[str, Any]:
        """Return the report of the run's end."""
        for start in range(MOST_STARTS):
            driver = self.run.start()
            self.story.append(f"start {start + 1}")
            self._break_until_the_end(driver)
            ended = self.run.finish(driver)
            self.story.append(f"exit code {ended.code} {ended.err.strip()[-300:]}")
            self._recount()
            if ended.code == 0:
                return ended.report
            self._assert_expected(ended)
        raise AssertionError(f"not done after {MOST_STARTS} starts: {self.story}")

    def _break_until_the_end(self, driver: subprocess.Popen[str]) -> None:
        while driver.poll() is None:
            deadline = time.monotonic() + self.rng.expovariate(1 / PAUSE)
            while driver.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            broken = sum(each in self.faults for each in self.story)
            if driver.poll() is None and broken < MOST_FAULTS:
                fault = self.rng.choice(sorted(self.faults))
                self.story.append(fault)
                self.faults[fault](driver)

    def _recount(self) -> None:
        """Recount what stands there now; nothing may be gone since the last time."""
        if self.run.url.startswith("sqlite") and not self.run.counts()["started"]:
            return  # there may be no ledger yet
        faults = recount(self.run.url, [self.run.output], self.run.folder / "since")
        assert not faults, faults

    def _assert_expected(self, ended: Ended) -> None:
        """A run that was not killed says in a line that the same command goes on."""
        if ended.code < 0:
            assert "driver" in self.story
        else:
            assert ended.code == 4 and ended.err.count("\n") == 1, self.story


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder for the output: a small disk, where this process may mount one."""
    with small_disk_at(tmp_path / "disk", "16m"):
        yield tmp_path / "disk"


def weathered(
    run: Runs, nodes: Nodes, number: int, check: Callable[[dict[str, Any]], None]
) -> None:
    method = run.tree["method"]["name"]
    storm = Storm(run, nodes, f"{method}, round {number}")
    result = "held"
    try:
        check(storm.weather())
    except BaseException as error:
        result = f"{type(error).__name__}: {error}"
        raise
    finally:
        place = {"method": method, "round": number, "database": database_of(number)}
        keep(storm=True, **place, story=storm.story, result=result)


@pytest.fixture
def ledger(number: int, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """The URL of the round's ledger. A run makes an SQLite one itself."""
    if database_of(number) == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.db"
    url = new_schema(request.getfixturevalue("postgresql_socket"))
    make_budget(url)
    return url


THREE = {"runtime__actors": 3, "runtime__cpus_per_actor": 2}
"""One on each node."""


@pytest.mark.parametrize("number", NUMBERS)
def test_private_prediction(
    runs: Callable[..., Runs], nodes: Nodes, disk: Path, ledger: str, number: int
) -> None:
    batches = ["disjoint", "poisson"][number // 2 % 2]
    changes = {"runtime__batches_per_task": 1, "output__path": str(disk / "out")}
    changes |= {"privacy__ledger": ledger}
    run = runs(**THREE, **changes, method__batches=batches).with_fault("slow")

    def check(report: dict[str, Any]) -> None:
        run.assert_whole(report)
        lines = run.marker.with_suffix(".begun").read_text().split()
        executed = Counter(
            line for line in lines if "/" in line
        )  # the engine's own tests have none
        with closing(Ledger.open(run.url)) as ledger:
            begun = Counter(unit for unit, _ in ledger.started(run.id))
        assert len(executed) == report["batches"]["published"]
        assert all(executed[batch] <= begun[batch] for batch in executed)

    weathered(run, nodes, number, check)


@pytest.mark.parametrize("number", NUMBERS)
def test_aug_pe(
    runs: Callable[..., Runs], nodes: Nodes, disk: Path, ledger: str, number: int
) -> None:
    places = {"output__path": str(disk / "out"), "privacy__ledger": ledger}
    run = runs(**THREE, **places, data__public_size=60)
    run.tree["method"] = AUG_PE
    with running_server() as endpoint:
        run.tree["engine"] = {"kind": "openai", "model": "m", "base_url": endpoint.url}
        weathered(run, nodes, number, lambda report: assert_once(run, report))
        assert "Marlowe" not in json.dumps([body for _, body in endpoint.requests])


@pytest.mark.parametrize("number", NUMBERS)
def test_dp_kps(
    runs: Callable[..., Runs], nodes: Nodes, disk: Path, tmp_path: Path, ledger: str, number: int
) -> None:
    words = tmp_path / "words.txt"
    words.write_text("\n".join(f"word{n}" for n in range(20)))
    places = {"output__path": str(disk / "out"), "privacy__ledger": ledger}
    run = runs(**THREE, **places).with_fault("slow")
    run.tree["method"] = {
        "name": "dp_kps", "vocabulary": str(words), "vocabulary_size": 10, "records": 60,
        "sequence_length": 2, "max_tokens": 8,
    }  # fmt: skip

    def check(report: dict[str, Any]) -> None:
        with closing(Ledger.open(run.url)) as ledger:
            assert ledger.verify() == []
            account = ledger.account("notes")
            published = [unit for unit, _ in ledger.published(run.id)]
        assert account is not None and len(account.charges) == 1
        assert (account.spent.epsilon, account.spent.delta) == (report["epsilon"], report["delta"])
        assert len(published) == len(set(published)) == 2  # the vocabulary and the densities
        assert len(run.synthetic()) == report["records"] == 60

    weathered(run, nodes, number, check)


@pytest.mark.parametrize("number", NUMBERS)
def test_dp_sgd(
    training: Callable[..., Runs], nodes: Nodes, disk: Path, ledger: str, number: int
) -> None:
    places = {"output__path": str(disk / "out"), "privacy__ledger": ledger}
    run = training(runtime__cpus_per_actor=2, **places)
    # A fault before or after the training repeats no step.
    weathered(run, nodes, number, lambda report: assert_charged(run, report, MOST_FAULTS, least=0))
