"""The accountant actor: the ledger's answers and errors come through, a killed one is replaced."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import ray
import sqlalchemy as sa
from ray.exceptions import OutOfMemoryError, RayActorError

from dpray.accounting.event import NEIGHBORING_RELATION
from dpray.accounting.events import DiscreteLaplace
from dpray.ledger import queries
from dpray.ledger.ledger import Ledger
from dpray.ledger.transaction import Transaction
from dpray.types import (
    AlreadyPublished,
    Budget,
    BudgetRefused,
    DprayError,
    InputError,
    LedgerConflict,
    LedgerError,
    MissingLedger,
    Resumable,
)
from dpray.workers.accountant import (
    NAMESPACE,
    Accountant,
    AccountantClient,
    actor_name,
    place_of,
    while_lost,
)

STATED_FOR = ("record", NEIGHBORING_RELATION)
CHARGE = (DiscreteLaplace(2.0, 1), Budget(0.5, 1e-7))
RUN = ({"run": CHARGE}, *STATED_FOR)
SHA = "a" * 64


@pytest.mark.parametrize(
    "error",
    [
        InputError("a line"),
        AlreadyPublished("a line"),
        BudgetRefused("notes", *(Budget(n, 0.0) for n in (1.0, 2.0, 3.0)), "a detail"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_travels_whole(error: DprayError):
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error)
    assert (str(arrived), vars(arrived)) == (str(error), vars(error))


def test_the_actors_class_only_delegates(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/ledger.db"
    accountant = Accountant(url)
    operation = (Transaction.reserve, "notes", *RUN)
    for missing in (
        accountant.read(queries.find_account, "notes"),
        accountant.write(*operation)[0],
    ):
        assert isinstance(missing, MissingLedger)
    Ledger.create_or_open(url).create_dataset("notes", Budget(1.0, 1e-6), *STATED_FOR)
    [entry], heads = accountant.write(*operation)
    assert (entry.seq, heads) == (1, {"notes": (2, entry.hash)})
    unknown = accountant.write(Transaction.reserve, "others", *RUN)[0]
    assert isinstance(unknown, InputError)


def test_what_waits_in_the_queue_is_one_transaction(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/ledger.db"
    Ledger.create_or_open(url).create_dataset("notes", Budget(1.0, 1e-6), *STATED_FOR)
    accountant = Accountant(url)
    accountant.write(Transaction.reserve, "notes", *RUN)
    commits, may_commit = [], threading.Event()

    def hold(_connection: sa.Connection) -> None:
        commits.append(1)
        assert may_commit.wait(60)

    sa.event.listen(sa.Engine, "commit", hold)
    try:
        with ThreadPoolExecutor(9) as pool:
            first = pool.submit(accountant.write, Transaction.begin, "run", "attempt-1", ["first"])
            while not commits:
                threading.Event().wait(0.01)
            later = [
                pool.submit(accountant.write, Transaction.begin, "run", "attempt-1", [f"a/{n}"])
                for n in range(8)
            ]
            while accountant._waiting.qsize() < 8:
                threading.Event().wait(0.01)
            may_commit.set()
            assert {call.result(60)[0] for call in [first, *later]} == {None}
    finally:
        sa.event.remove(sa.Engine, "commit", hold)
    assert len(commits) == 2, "the one that was waited for, and all the others"
    assert accountant.read(queries.count, "run")["started"] == 9


def test_an_error_of_the_code_is_the_callers_and_the_queue_goes_on(tmp_path: Path):
    def broken(transaction: Transaction) -> None:
        raise TypeError("broken")

    url = f"sqlite:///{tmp_path}/ledger.db"
    Ledger.create_or_open(url).create_dataset("notes", Budget(1.0, 1e-6), *STATED_FOR)
    accountant = Accountant(url)
    with pytest.raises(TypeError, match="broken"):
        accountant.write(broken)
    assert accountant.write(Transaction.reserve, "notes", *RUN)[0][0].seq == 1


def test_an_actors_name_hides_the_password():
    names = {actor_name(f"postgresql://me:{word}@host/db", "1") for word in ("hunter2", "other")}
    assert len(names) == 2
    assert not any("hunter2" in name for name in names)


def test_the_same_path_on_two_nodes_is_two_ledgers_and_a_database_is_one():
    """Charges of a driver on one node went to the file of that path on the other one."""
    files, databases = (
        {actor_name(url, node) for node in ("1", "2")}
        for url in ("sqlite:////home/me/ledger.db", "postgresql://me@host/db")
    )
    assert (len(files), len(databases)) == (2, 1)


def test_only_the_head_needs_the_password_of_a_database(driver: None):
    """The accountant of a file is where the file is; workers never connect to a database."""
    [head] = ray.nodes()
    [(resource, amount)] = place_of("postgresql://me@host/db", head["NodeID"])["resources"].items()
    assert 0 < amount < 0.01 and head["Resources"][resource] == 1.0
    strategy = place_of("sqlite:////home/me/ledger.db", "1" * 56)["scheduling_strategy"]
    assert (strategy.node_id, strategy.soft) == ("1" * 56, False)


@pytest.fixture
def url(driver: None, tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/ledger.db"
    Ledger.create_or_open(url).create_dataset("notes", Budget(1.0, 1e-6), *STATED_FOR)
    return url


@pytest.fixture
def accountant(url: str) -> Iterator[AccountantClient]:
    accountant = AccountantClient(url)
    yield accountant
    ray.kill(actor_of(url))


def actor_of(url: str) -> Any:
    node_id = ray.get_runtime_context().get_node_id()
    return ray.get_actor(actor_name(url, node_id), namespace=NAMESPACE)


def process_of(url: str) -> int:
    return ray.get(actor_of(url).__ray_call__.remote(lambda self: os.getpid()))


@pytest.mark.slow
def test_a_run_through_the_actor(accountant: AccountantClient, url: str):
    [reservation] = accountant.reserve(" NOTES", *RUN, files=[b"a file's digest"])
    assert reservation.seq == 1
    ledger = Ledger.open(url)
    assert ledger.is_reserved("run") and not ledger.is_reserved("another")
    accountant.begin("run", "attempt-1", (f"a/{n}" for n in range(3)))
    assert accountant.publish("run", "attempt-1", [("a/0", SHA)]) == 1
    both = {"a/0": SHA, "a/1": SHA}
    assert accountant.publish("run", "attempt-1", both.items()) == 1
    assert accountant.fail("run", "a/2", "attempt-1", "ValueError")
    assert [unit for unit, _ in accountant.published("run")] == ["a/0", "a/1"]
    assert [unit for unit, _ in accountant.failed("run")] == ["a/2"]
    assert list(accountant.unfinished("run")) == []
    assert accountant.commit("run")
    last = accountant.last_commit("run")
    assert ledger.holds("notes", last.seq, last.hash)
    assert accountant.counts("run") == ledger.counts("run")
    account = accountant.account("notes")
    assert account is not None
    assert account.left == Budget(0.5, 9e-7)


@pytest.mark.slow
def test_errors_come_out_as_themselves(accountant: AccountantClient, url: str):
    Ledger.open(url).create_dataset("small", Budget(0.4, 1e-6), *STATED_FOR)
    with pytest.raises(BudgetRefused) as refused:
        accountant.reserve("small", *RUN)
    assert refused.value.left == Budget(0.4, 1e-6)
    accountant.reserve("notes", {"first": CHARGE}, *STATED_FOR, [b"a file's digest"])
    other = {"other": (DiscreteLaplace(10.0, 1), Budget(0.1, 1e-7))}
    with pytest.raises(InputError, match="as 'notes'"):
        accountant.reserve("small", other, *STATED_FOR, [b"a file's digest"])
    assert refused.value.exit_code == 3
    with pytest.raises(LedgerConflict, match="no reservation"):
        accountant.begin("run", "attempt-1", ["a/0"])
    with pytest.raises(InputError, match="there is no ledger"):
        AccountantClient(url + "-none").account("notes")


@pytest.mark.slow
def test_everybody_gets_the_same_actor(accountant: AccountantClient, url: str):
    @ray.remote(num_cpus=0)
    def publish(client: AccountantClient, attempt: str) -> bool:
        try:
            return client.publish("run", attempt, [("a/0", SHA)]) == 1
        except AlreadyPublished:
            return False

    accountant.reserve("notes", *RUN)
    before = process_of(url)
    answers = ray.get([publish.remote(accountant, f"attempt-{n}") for n in range(4)])
    assert sorted(answers) == [False, False, False, True]
    AccountantClient(url).account("notes")
    assert process_of(url) == before


@pytest.mark.slow
def test_an_accountant_killed_between_reserve_and_commit(accountant: AccountantClient, url: str):
    accountant.reserve("notes", *RUN)
    before = process_of(url)
    os.kill(before, signal.SIGKILL)

    other = AccountantClient(url)
    account = other.account("notes")
    assert account is not None
    assert account.spent == Budget(0.5, 1e-7)
    assert process_of(url) != before
    assert other.reserve("notes", *RUN)[0].seq == 1
    # The old client finds the new actor by itself.
    accountant.begin("run", "attempt-1", ["a/0"])
    assert accountant.publish("run", "attempt-1", [("a/0", SHA)]) == 1
    assert accountant.commit("run")
    assert Ledger.open(url).verify() == []


def lost(times: int) -> Iterator[Exception]:
    """The two errors of Ray for an actor that is gone, in turn."""
    for number in range(times):
        yield [OutOfMemoryError("low on memory"), RayActorError()][number % 2]


@pytest.mark.slow
@pytest.mark.parametrize("times", [0, 1, 4])
def test_a_call_is_repeated_while_the_accountant_is_lost(times: int):
    errors = lost(times)

    def call(answer: str) -> str:
        for error in errors:
            raise error
        return answer

    assert while_lost(call, "written") == "written"


@pytest.mark.slow
def test_a_run_stops_and_can_go_on_if_the_accountant_is_lost_again_and_again():
    errors = lost(1_000)

    def call() -> None:
        raise next(errors)

    with pytest.raises(Resumable, match="accountant on Ray was lost again and again"):
        while_lost(call)


@pytest.mark.slow
def test_a_ledger_put_back_while_the_accountant_was_dead_is_refused(
    accountant: AccountantClient, url: str, tmp_path: Path
):
    """The new accountant saw nothing; its client did."""
    accountant.reserve("notes", *RUN)
    paths = tmp_path / "ledger.db", tmp_path / "backup.db"
    with closing(sqlite3.connect(paths[0])) as source, closing(sqlite3.connect(paths[1])) as copy:
        source.backup(copy)
    accountant.begin("run", "attempt-1", ["a/0"])
    ray.kill(actor_of(url))
    for suffix in ("-wal", "-shm"):
        (tmp_path / f"ledger.db{suffix}").unlink(missing_ok=True)
    shutil.copy(paths[1], paths[0])
    with pytest.raises(LedgerError, match="put back to an earlier state"):
        accountant.begin("run", "attempt-1", ["a/1"])
    assert Ledger.open(url).verify() == []


@pytest.mark.slow
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_of_two_hundred_that_race_through_the_actor_for_the_last_unit_exactly_one_wins(
    driver: None, database: str, tmp_path: Path, request: pytest.FixtureRequest
):
    url = f"sqlite:///{tmp_path}/ledger.db"
    if database == "postgresql":
        url = request.getfixturevalue("postgresql_url")
    ledger = Ledger.create_or_open(url)
    ledger.create_dataset("notes", Budget(1.0, 1e-6), *STATED_FOR)
    ledger.reserve("notes", {"first": CHARGE}, *STATED_FOR)
    client = AccountantClient(url)
    client.account("notes")
    gate = threading.Barrier(200)

    def race(number: int) -> bool:
        gate.wait(120)
        try:
            client.reserve("notes", {f"last-{number}": CHARGE}, *STATED_FOR)
        except BudgetRefused:
            return False
        return True

    with ThreadPoolExecutor(200) as pool:
        won = list(pool.map(race, range(200)))
    ray.kill(client._actor)
    assert sum(won) == 1
    assert ledger.account("notes").spent == Budget(1.0, 2e-7)
    assert ledger.verify() == []
