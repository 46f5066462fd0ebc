"""Operations that share a transaction, threads that share a ledger, and lost connections."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa

from dpray.accounting.events import DiscreteLaplace
from dpray.ledger.ledger import Ledger, Write
from dpray.ledger.transaction import Transaction
from dpray.types import AlreadyPublished, Budget, BudgetRefused, InputError, LedgerError
from tests.ledger.charges import ASKED, BUDGET, SHA, STATED_FOR, TENTH, listener, reserve


@pytest.fixture
def commits() -> Iterator[list[int]]:
    """One item for each transaction that was committed."""
    seen: list[int] = []

    def note(_connection: sa.Connection) -> None:
        seen.append(1)

    with listener("commit", note):
        yield seen


def reservation(
    key: str, dataset: str, charge: tuple[DiscreteLaplace, Budget] = (TENTH, ASKED)
) -> Write:
    return Write(Transaction.reserve, (dataset, {key: charge}, *STATED_FOR), {})


def publication(attempt: str) -> Write:
    return Write(Transaction.publish, ("run", attempt, [("a/0", SHA)]), {})


def test_operations_share_a_transaction_and_each_has_its_own_answer(
    ledger: Ledger, commits: list[int]
):
    ledger.create_dataset("other", BUDGET, *STATED_FOR)
    reserve(ledger, "run")
    commits.clear()
    answers = ledger.write_together(
        [
            reservation("run-1", "notes"),
            publication("attempt-1"),
            reservation("big", "notes", (DiscreteLaplace(1.0, 1), Budget(1.0, 0.0))),
            publication("attempt-2"),
            reservation("run-2", "other"),
            reservation("run-3", "unknown"),
            reservation("run-1", "notes"),
        ]
    )
    assert commits == [1]
    kinds = [type(answer) for answer in answers]
    assert kinds == [
        list, int, BudgetRefused, AlreadyPublished, list, InputError, list,
    ]  # fmt: skip
    assert answers[6] == answers[0], "what another one just reserved is found"
    assert "no data set 'unknown'" in str(answers[5])
    assert ledger.account("notes").spent.epsilon == 0.2
    assert ledger.account("other").spent.epsilon == 0.1
    assert Ledger.open(str(ledger)).verify() == []


@pytest.mark.parametrize("is_transient", [True, False])
def test_one_that_the_database_refuses_takes_none_with_it_if_that_may_pass(
    ledger: Ledger,
    url: str,
    commits: list[int],
    monkeypatch: pytest.MonkeyPatch,
    is_transient: bool,
):
    monkeypatch.setattr("dpray.ledger.ledger.is_transient", lambda error: is_transient)
    ledger.create_dataset("other", BUDGET, *STATED_FOR)
    refused: list[str] = []

    def refuse(_connection, _cursor, statement, parameters, *_rest):
        if "INSERT" in statement and "run-other" in str(parameters) and not refused:
            refused.append(statement)
            raise sa.exc.OperationalError("lost", None, Exception("lost"))

    commits.clear()
    with listener("before_cursor_execute", refuse):
        answers = ledger.write_together(
            [reservation(f"run-{name}", name) for name in ("notes", "other")]
        )
    if is_transient:
        assert [type(answer) for answer in answers] == [list, list] and len(commits) == 1
    else:
        assert all(isinstance(answer, LedgerError) for answer in answers) and not commits
    expected = 0.1 if is_transient else 0.0
    # A name, or a run's data set, that only the lost transaction saw is not remembered.
    assert [ledger.account(name).spent.epsilon for name in ledger.names()] == [expected] * 2
    assert Ledger.open(url).verify() == []


RACERS = 60


@pytest.mark.slow
def test_of_many_that_race_for_the_last_unit_exactly_one_wins(ledger: Ledger, url: str):
    """On shared ledgers, as the accountant's threads have one, and on ledgers of their own."""
    for run in range(9):
        reserve(ledger, f"run-{run}")
    ledgers = [ledger, *(Ledger.open(url) for _ in range(4))]
    gate = threading.Barrier(RACERS)

    def race(number: int) -> bool:
        gate.wait(120)
        try:
            reserve(ledgers[number % len(ledgers)], f"last-{number}")
        except BudgetRefused:
            return False
        return True

    with ThreadPoolExecutor(RACERS) as pool:
        won = list(pool.map(race, range(RACERS)))
    assert sum(won) == 1
    account = Ledger.open(url).account("notes")
    assert (len(account.charges), account.spent.epsilon) == (10, 1.0)
    assert ledger.verify() == []


# PostgreSQL: lost connections


def terminate(url: str, where: str) -> int:
    """End the server's processes of which this holds, from a connection of its own."""
    query = f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE {where}"
    with psycopg.connect(url, autocommit=True) as other:
        return len(other.execute(query).fetchall())


@pytest.fixture
def postgresql(postgresql_url: str) -> Ledger:
    ledger = Ledger.create_or_open(postgresql_url)
    ledger.create_dataset("notes", BUDGET, *STATED_FOR)
    return ledger


def is_charged_once(ledger: Ledger, url: str) -> bool:
    account = Ledger.open(url).account("notes")
    return len(account.charges) == 1 and ledger.verify() == []


@pytest.mark.slow
def test_a_connection_lost_before_the_commit(postgresql: Ledger, postgresql_url: str):
    cuts = []

    def cut(connection: sa.Connection) -> None:
        if not cuts:
            pid = connection.connection.dbapi_connection.info.backend_pid
            cuts.append(terminate(postgresql_url, f"pid = {pid}"))

    with listener("commit", cut):
        reserve(postgresql, "run")
    assert cuts == [1] and is_charged_once(postgresql, postgresql_url)


class Proxy:
    """Forwards a connection to a server's socket, and cuts it once, when the server has answered a
    COMMIT and before the client has heard of it."""

    def __init__(self, folder: Path, server: str) -> None:
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(str(folder / ".s.PGSQL.5432"))
        self.listening.listen()
        self.server, self.is_armed, self.cuts = server, False, 0
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            client, _ = self.listening.accept()
            server = socket.socket(socket.AF_UNIX)
            server.connect(f"{self.server}/.s.PGSQL.5432")
            for pair in ((client, server), (server, client)):
                threading.Thread(target=self.copy, args=pair, daemon=True).start()

    def copy(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self.is_armed and not self.cuts and b"C\x00\x00\x00\x0bCOMMIT\x00" in data:
                    self.cuts += 1
                    break
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
def test_a_commit_whose_answer_is_lost(
    postgresql: Ledger, postgresql_url: str, postgresql_socket: str
):
    """It happened, and nobody said so: the same charge is found, and is not made twice."""
    folder = Path(f"{postgresql_socket}/proxy-{os.getpid()}")
    folder.mkdir()
    proxy = Proxy(folder, postgresql_socket)
    ledger = Ledger.open(postgresql_url.replace(f"host={postgresql_socket}", f"host={folder}"))
    proxy.is_armed = True
    reserve(ledger, "run")
    assert proxy.cuts == 1 and is_charged_once(postgresql, postgresql_url)


@pytest.mark.slow
def test_a_connection_that_is_lost_every_time_is_one_clear_line(
    postgresql: Ledger, postgresql_url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("dpray.ledger.ledger.ATTEMPTS", 2)

    def cut(connection: sa.Connection) -> None:
        pid = connection.connection.dbapi_connection.info.backend_pid
        terminate(postgresql_url, f"pid = {pid}")

    with listener("commit", cut), pytest.raises(LedgerError) as failed:
        reserve(postgresql, "run")
    assert "\n" not in str(failed.value)
    reserve(postgresql, "run")
    assert is_charged_once(postgresql, postgresql_url)


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_not_waited_for_for_good(
    postgresql: Ledger, postgresql_url: str
):
    asked = {}

    def note(connection: sa.Connection) -> None:
        info = connection.connection.dbapi_connection.info.get_parameters()
        asked.update({key: value for key, value in info.items() if key.startswith(("keep", "tcp"))})
        for name in ("lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout"):
            asked[name] = connection.exec_driver_sql(f"SHOW {name}").scalar()

    with listener("commit", note):
        reserve(postgresql, "run")
        assert asked["keepalives_idle"] == "30"
        reserve(Ledger.open(f"{postgresql_url}&keepalives_idle=7"), "run-2")
    assert asked == {
        "keepalives_idle": "7", "keepalives_interval": "10", "keepalives_count": "3",
        "tcp_user_timeout": "60000", "lock_timeout": "1min", "statement_timeout": "2min",
        "idle_in_transaction_session_timeout": "2min",
    }  # fmt: skip
