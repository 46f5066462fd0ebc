"""A run on the rows of a database: one copy of them, whatever the table has later."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import dpray
from dpray.config.config import Config
from dpray.evaluation.canaries import _planted_rows
from dpray.evaluation.files import files_of
from dpray.ledger.ledger import Ledger
from dpray.methods import registry as methods
from dpray.methods.config import parse_config
from dpray.types import InputError
from dpray.workers.cluster import refuse_unreached
from tests.workers.outcomes import lines

Changes = Callable[..., Config]

QUERY = "SELECT text, label FROM notes WHERE author <> 'Marlowe'"


@pytest.fixture
def table(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """Sixty notes that name spring."""
    with closing(sqlite3.connect(tmp_path / "notes.db", isolation_level=None)) as connection:
        connection.execute("CREATE TABLE notes (text TEXT, label TEXT, author TEXT)")
        rows = [(f"word1 {number}", "ab"[number % 2], "Vivian") for number in range(60)]
        connection.executemany("INSERT INTO notes VALUES (?, ?, ?)", rows)
        yield connection


@pytest.fixture
def config(
    settings: Callable[..., dict[str, Any]],
    sequences: dict[str, Any],
    tmp_path: Path,
    table: sqlite3.Connection,
) -> Changes:
    database = {"data__path": f"sqlite:///{tmp_path}/notes.db", "data__query": QUERY}
    return lambda **changes: parse_config(settings(**sequences | database | changes))


def snapshots(run: Config) -> list[Path]:
    return [*Path(run.output.path).glob("private/snapshot/*/rows.jsonl")]


def test_a_run_goes_on_with_the_rows_that_it_began_with(
    config: Changes, cut_off: Callable[..., None], table: sqlite3.Connection, tmp_path: Path
) -> None:
    run = config()
    cut_off(run, "total_sums")
    [kept] = snapshots(run)
    before = kept.read_bytes()
    assert before.count(b"\n") == 60
    table.execute("UPDATE notes SET text = 'word2'")
    table.execute("DROP TABLE notes")
    report = methods.run(run)
    assert report["records"] == 8 and lines(run)
    assert not snapshots(run)  # a copy of private rows has no use in a finished run
    with closing(Ledger.open(run.privacy.ledger)) as ledger:
        account = ledger.account("notes")
    assert account is not None and len(account.charges) == 1
    for name in ("run.json", "privacy_report.json", "synthetic.jsonl"):
        released = (Path(run.output.path) / name).read_text()
        assert "Marlowe" not in released and "notes.db" not in released, name


def test_a_run_that_began_takes_no_other_rows(
    config: Changes, cut_off: Callable[..., None], table: sqlite3.Connection
) -> None:
    run = config()
    cut_off(run, "total_sums")
    [kept] = snapshots(run)
    rows = kept.read_bytes()
    assert json.loads(rows.splitlines()[0]) == {"text": "word1 0", "label": "a"}
    kept.write_bytes(rows.replace(b"word1", b"word3"))
    with pytest.raises(InputError, match=r"^data\.path: the records have changed since the run"):
        methods.run(run)
    kept.unlink()  # and the table gives others
    table.execute("DELETE FROM notes WHERE label = 'a'")
    with pytest.raises(InputError, match=r"^data\.path: the records have changed since the run"):
        methods.run(run)
    with pytest.raises(InputError, match=r"another configuration \(other now: data\)"):
        methods.run(config(data__query="SELECT 'x' AS text, 'a' AS label"))


def test_the_ledger_knows_the_rows_under_another_name(config: Changes, tmp_path: Path) -> None:
    methods.run(config())
    other = config(privacy__dataset="copies", output__path=f"{tmp_path}/other")
    with pytest.raises(InputError, match=r"^privacy\.dataset: the ledger knows this data"):
        methods.run(other)


def test_a_query_that_fails_charges_nothing(config: Changes) -> None:
    run = config(data__query="SELECT text, label FROM nots")
    with pytest.raises(InputError, match=r"^data\.query: is refused by the database"):
        methods.run(run)
    assert not Path(run.privacy.ledger.removeprefix("sqlite:///")).exists()
    assert not snapshots(run)


def test_check_and_audit_read_a_copy_that_vanishes(config: Changes, table: Any) -> None:
    table.execute("INSERT INTO notes VALUES (NULL, 'a', 'Vivian')")
    run = config()
    found = dpray.check(run)
    assert (found["rows"], found["records"]) == (61, 60)
    [error] = found["errors"]
    assert error["first"] == ["rows.jsonl, row 61"]
    with files_of(run.data) as data:
        assert len([*_planted_rows(data, [])]) == 61
    assert not Path(data.path).exists() and not snapshots(run)


def test_other_machines_have_to_see_the_copy(tmp_path: Path) -> None:
    refuse_unreached(tmp_path, 1)
    with pytest.raises(InputError, match=r"^data\.query: its rows are copied to output\.path"):
        refuse_unreached(tmp_path, 2)


def test_a_run_that_was_refused_before_its_charge_asks_again(
    config: Changes, table: sqlite3.Connection
) -> None:
    """Its rows may have been corrected since, or somebody's deleted."""
    table.execute("UPDATE notes SET label = 'c'")
    run = config()
    with pytest.raises(InputError, match=r"label is not one of data\.labels"):
        methods.run(run)
    table.execute("UPDATE notes SET label = 'a'")
    assert methods.run(run)["records"] == 8
