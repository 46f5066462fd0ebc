"""Deleted reservations, and ledgers put back to an earlier state."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from dpray.cli import run_command
from dpray.ledger.ledger import Ledger
from dpray.ledger.queries import entries
from dpray.types import Budget, LedgerConflict, LedgerError
from tests.ledger.charges import ASKED, BUDGET, STATED_FOR, TENTH, listener, reserve
from tests.report.reports import a_report


@pytest.fixture
def ledger(url: str) -> Ledger:
    """A data set with two runs, both committed: entries 0 create, 1 reserve, 2 commit, 3, 4."""
    ledger = Ledger.create_or_open(url)
    ledger.create_dataset("notes", BUDGET, *STATED_FOR)
    for run in ("run-1", "run-2"):
        reserve(ledger, run)
        ledger.commit(run)
    return ledger


def edit(connection: Callable[[], sa.Connection], *statements: str) -> None:
    with connection() as open_connection:
        for statement in statements:
            open_connection.exec_driver_sql(statement)


def test_a_deleted_reservation_is_no_budget_to_look_at(
    ledger: Ledger, connection: Callable[[], sa.Connection]
):
    edit(connection, "DELETE FROM dpray_entries WHERE kind = 'reserve' AND key = 'run-1'")
    for look in (lambda: ledger.account("notes"), ledger.show):
        with pytest.raises(LedgerError, match="not as they were written"):
            look()


def report_of(ledger: Ledger, key: str, folder: Path) -> Path:
    """A run's folder, as far as `--contains` reads it."""
    last = ledger.last_commit(key)
    folder.mkdir()
    place = {"dataset": last.dataset, "sequence": last.seq, "head": last.hash}
    report = a_report(ledger=a_report()["ledger"] | place)
    (folder / "privacy_report.json").write_text(json.dumps(report))
    return folder


def put_back(connection: Callable[[], sa.Connection], length: int) -> None:
    """The ledger as it was when the data set had so many entries, whole in itself."""
    edit(
        connection,
        f"DELETE FROM dpray_entries WHERE seq >= {length}",
        f"UPDATE dpray_datasets SET length = {length}, reservations = (SELECT count(*) FROM "
        "dpray_entries WHERE kind = 'reserve'), head = (SELECT hash FROM dpray_entries "
        f"WHERE seq = {length - 1})",
    )


def verify(url: str, *runs: Path) -> int:
    contains = [option for run in runs for option in ("--contains", str(run))]
    return run_command(["ledger", "verify", "--ledger", url, "--json", *contains])


def test_a_backup_that_was_put_back_does_not_contain_the_run(
    ledger: Ledger,
    url: str,
    connection: Callable[[], sa.Connection],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
):
    first, second = (report_of(ledger, run, tmp_path / run) for run in ("run-1", "run-2"))
    assert verify(url, first, second) == 0
    both = {str(first): True, str(second): True}
    assert json.loads(capfd.readouterr().out) == {"problems": [], "contains": both}

    put_back(connection, 3)
    assert ledger.verify() == [], "nothing in the ledger itself tells"
    assert ledger.account("notes").spent == ASKED
    assert verify(url, first) == 0
    capfd.readouterr()
    assert verify(url, first, second) == 2
    said = json.loads(capfd.readouterr().out)
    assert said["contains"] == both | {str(second): False}
    [problem] = said["problems"]
    assert problem.startswith(f"{second}: ") and "earlier state" in problem

    # Another run in the place of the lost one is another entry.
    opened = Ledger.open(url)
    reserve(opened, "run-3")
    opened.commit("run-3")
    assert verify(url, second) == 2


@pytest.mark.parametrize("length", [1, 4])
def test_who_has_seen_more_than_the_ledger_holds_charges_nothing_to_it(
    ledger: Ledger, url: str, connection: Callable[[], sa.Connection], length: int
):
    """A database that failed over to an older copy, under a process that goes on."""
    put_back(connection, length)
    with pytest.raises(LedgerError, match="put back to an earlier state"):
        reserve(ledger, "run-3")
    # Nor once others, who saw nothing of it, have written more than was lost.
    opened = Ledger.open(url)
    for run in range(3, 10):
        reserve(opened, f"run-{run}")
    with pytest.raises(LedgerError, match="put back to an earlier state"):
        reserve(ledger, "run-10")
    ledger.create_dataset("other", BUDGET, *STATED_FOR)
    reserve(ledger, "run-11", "other")
    assert ledger.verify() == []


def test_what_another_process_saw_counts_too(
    ledger: Ledger, url: str, connection: Callable[[], sa.Connection]
):
    whole, back = Ledger.open(url), Ledger.open(url)
    for opened in (whole, back):
        opened.require_heads(ledger.chain_heads())
    reserve(whole, "run-3")
    reserve(ledger, "run-4")  # who has seen less than the ledger holds goes on
    assert whole.chain_heads()["notes"][0] == ledger.chain_heads()["notes"][0] - 1 == 6
    put_back(connection, 3)
    with pytest.raises(LedgerError, match="put back to an earlier state"):
        reserve(back, "run-3")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({}, "does not name the run's last entry"),
        (None, "does not name the run's last entry"),
        ({"sequence": "two", "head": "x"}, "ledger.sequence is not as dpray writes it"),
        ({"sequence": 10**30, "head": "x"}, "ledger.sequence is not as dpray writes it"),
        ({"dataset": "\ud800", "sequence": 1, "head": "x"}, "does not name the run's last"),
        ({"dataset": "\x1b[2J", "sequence": 1, "head": "x"}, "does not name the run's last"),
    ],
)
def test_a_report_without_its_place_is_named(
    ledger: Ledger,
    url: str,
    tmp_path: Path,
    place: dict[str, object] | None,
    said: str,
    capfd: pytest.CaptureFixture[str],
):
    report = a_report(ledger=None if place is None else a_report()["ledger"] | place)
    (tmp_path / "privacy_report.json").write_text(json.dumps(report))
    assert verify(url, tmp_path) == 2
    assert said in capfd.readouterr().err


def test_the_last_commit_is_a_runs_last_entry(ledger: Ledger):
    assert [ledger.last_commit(run).seq for run in ("run-1", "run-2")] == [2, 4]
    with pytest.raises(LedgerConflict, match="not committed"):
        ledger.last_commit("run-3")


def test_an_admission_reads_its_own_data_sets_charges_alone(
    ledger: Ledger, url: str, connection: Callable[[], sa.Connection]
):
    """The database's own plan says so, with many entries of other kinds and of other data sets."""
    ledger.create_dataset("other", Budget(1e6, 1e-2), *STATED_FOR)
    charges = {f"other-{n}": (TENTH, ASKED) for n in range(300)}
    ledger.reserve("other", charges, *STATED_FOR)
    reserve(ledger, "open")
    ledger.begin("open", "attempt-1", [f"a/{n}" for n in range(2000)])
    statements: list[str] = []

    def note(_connection, _cursor, statement, *_rest) -> None:
        if "WHERE dataset = " in statement:
            statements.append(statement)

    with listener("before_cursor_execute", note):
        reserve(Ledger.open(url), "run-3")
    [statement] = statements
    with connection() as open_connection:
        assert open_connection.scalar(sa.select(sa.func.count()).select_from(entries)) > 2300
        if url.startswith("sqlite"):
            question = f"EXPLAIN QUERY PLAN {statement}"
            arguments: object = ("notes",)
        else:
            open_connection.exec_driver_sql("ANALYZE dpray_entries")
            question = f"EXPLAIN (ANALYZE) {statement}"
            arguments = {"dataset": "notes"}
        plan = "\n".join(map(str, open_connection.exec_driver_sql(question, arguments)))
    assert "dpray_entries_account" in plan
    assert "Removed by Filter" not in plan
