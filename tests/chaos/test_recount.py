"""The recount finds what was planted in a ledger or a run's folder, also where every hash fits."""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dpray.methods import registry
from dpray.methods.config import parse_config
from tests.chaos import recount as module
from tests.chaos.recount import COLUMNS, Entry, read, recount

Rows = list[Entry]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the ledger, the data and the output of a finished run of DP-KPS."""
    folder = tmp_path_factory.mktemp("finished")
    rows = ({"text": f"word{n} word{n + 1} Marlowe", "label": "ab"[n % 2]} for n in range(12))
    (folder / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "words.txt").write_text("".join(f"word{n}\n" for n in range(20)))
    labels = {"label": "label", "labels": ["a", "b"], "public_size": 12}
    budget = {"epsilon": 8.0, "delta": 1e-5, "dataset": "notes"}
    tree = {
        "data": {"path": str(folder / "records.jsonl")} | labels,
        "privacy": budget | {"ledger": f"sqlite:///{folder}/ledger.db"},
        "method": {
            "name": "dp_kps", "vocabulary": str(folder / "words.txt"), "vocabulary_size": 7,
            "phrases_per_record": 4, "sequence_length": 3, "records": 8,
        },
        "engine": {"kind": "none"},
        "runtime": {"ray_address": "none"},
        "output": {"path": str(folder / "out")},
    }  # fmt: skip
    registry.run(parse_config(tree))
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def found(run: Path) -> list[str]:
    return recount(f"sqlite:///{run}/ledger.db", [run / "out"])


def rewrite(run: Path, change: Callable[[Rows], Rows]) -> None:
    """Write a whole new chain of the changed entries, as somebody who knows the hashes can."""
    rows, _ = read(f"sqlite:///{run}/ledger.db")
    head, chain = "0" * 64, []
    for number, row in enumerate(change(rows)):
        entry = row._replace(seq=number, prev_hash=head)
        content = json.dumps(list(entry[:-1]), separators=(",", ":"))
        head = hashlib.sha256(content.encode()).hexdigest()
        chain.append(entry._replace(hash=head))
    reservations = sum(entry.kind == "reserve" for entry in chain)
    with closing(sqlite3.connect(run / "ledger.db")) as database, database:
        database.execute("DELETE FROM dpray_entries")
        places = ", ".join("?" * len(Entry._fields))
        database.executemany(f"INSERT INTO dpray_entries ({COLUMNS}) VALUES ({places})", chain)
        end = (len(chain), head, reservations)
        database.execute("UPDATE dpray_datasets SET length = ?, head = ?, reservations = ?", end)


def edit(file: Path, change: Callable[[Any], None]) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def of_kind(rows: Rows, kind: str) -> int:
    return [entry.kind for entry in rows].index(kind)


def without(kind: str) -> Callable[[Rows], Rows]:
    return lambda rows: [e for n, e in enumerate(rows) if n != of_kind(rows, kind)]


def doubled(kind: str) -> Callable[[Rows], Rows]:
    """The table's index allows a second entry with another attempt's name."""

    def change(rows: Rows) -> Rows:
        place = of_kind(rows, kind)
        return [*rows[: place + 1], rows[place]._replace(attempt="again"), *rows[place + 1 :]]

    return change


def cheaper(rows: Rows) -> Rows:
    place = of_kind(rows, "reserve")
    values = rows[place].values | {"epsilon": 1.0}
    text = json.dumps(values, separators=(",", ":"), sort_keys=True)
    return [*rows[:place], rows[place]._replace(payload=text), *rows[place + 1 :]]


def dearer(rows: Rows) -> Rows:
    place = of_kind(rows, "reserve")
    return [*rows, rows[place]._replace(key="another")]


def begun_late(rows: Rows) -> Rows:
    place = of_kind(rows, "begin")
    return [*rows[:place], *rows[place + 1 : -1], rows[place], rows[-1]]


def after_commit(rows: Rows) -> Rows:
    return [*rows[:-2], rows[-1], rows[-2]]


def test_a_finished_run_has_no_faults(run: Path) -> None:
    assert found(run) == []


def test_it_shares_no_code_with_dpray() -> None:
    tree = ast.parse(Path(module.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports for alias in node.names}
    names |= {node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}
    assert "sqlite3" in names and not any("dpray" in name or "tests" in name for name in names)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (without("reserve"), "not charged once"),
        (doubled("reserve"), "not charged once"),
        (cheaper, "more than its charges"),
        (dearer, "its budget is"),
        (without("begin"), "before it was begun"),
        (begun_late, "before it was begun"),
        (doubled("publish"), "ended twice"),
        (without("publish"), "the ledger does not know of it"),
        (without("commit"), "names an entry that does not end this run"),
        (after_commit, "something follows its commit"),
        (doubled("create"), "not made once"),
    ],
)
def test_a_whole_new_chain_hides_nothing(
    run: Path, change: Callable[[Rows], Rows], fault: str
) -> None:
    rewrite(run, change)
    faults = found(run)
    assert any(fault in each for each in faults), faults
    assert not any("hash" in each or "does not end where" in each for each in faults)


@pytest.mark.parametrize(
    ("statement", "fault"),
    [
        ("UPDATE dpray_entries SET payload = payload || ' ' WHERE kind = 'reserve'", "hash"),
        ("DELETE FROM dpray_entries WHERE kind = 'begin'", "is missing"),
        ("DELETE FROM dpray_entries WHERE kind = 'commit'", "does not end where"),
        ("UPDATE dpray_datasets SET reservations = 0", "does not end where"),
        ("DELETE FROM dpray_datasets", "does not end where"),
        ("DELETE FROM dpray_entries", "it has no entries"),
        ("DROP TABLE dpray_datasets", "does not end where"),
        ("DROP TABLE dpray_entries", "the ledger has no charge"),
    ],
)
def test_an_edited_table(run: Path, statement: str, fault: str) -> None:
    with closing(sqlite3.connect(run / "ledger.db")) as database, database:
        database.execute(statement)
    assert any(fault in each for each in found(run))


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("privacy_report.json", lambda r: r.update(epsilon=7.0), "less than its first charge"),
        ("privacy_report.json", lambda r: r.update(epsilon=9.0), "more than its charges"),
        ("privacy_report.json", lambda r: r.update(records=9), "9 records"),
        ("privacy_report.json", lambda r: r["ledger"]["spent"].update(epsilon=1.0), "is spent"),
        ("privacy_report.json", lambda r: r["ledger"]["left"].update(epsilon=1.0), "the budget"),
        ("run.json", lambda r: r.update(state="planned"), "nothing is charged"),
        ("run.json", lambda r: r.update(run_id="0" * 32), "the ledger has no charge"),
        ("private/parts/density.json", lambda r: r.update(more=1), "does not know of it"),
    ],
)
def test_an_edited_folder(run: Path, name: str, change: Callable[[Any], None], fault: str) -> None:
    edit(run / "out" / name, change)
    faults = found(run)
    assert any(fault in each for each in faults), faults


def test_a_ledger_that_was_not_made_whole_has_no_charges(run: Path) -> None:
    (run / "ledger.db").unlink()
    (run / "ledger.db").touch()
    assert recount(f"sqlite:///{run}/ledger.db", []) == []
    assert found(run) == [
        "out: run.json says that the run is charged, and the ledger has no charge"
    ]


@pytest.mark.parametrize("name", ["synthetic.jsonl", "privacy_report.json"])
def test_a_finished_run_without_a_file_of_its_release(run: Path, name: str) -> None:
    (run / "out" / name).unlink()
    assert found(run) == [f"out: it is finished, and {name} is missing"]


def test_a_report_that_names_the_end_of_another_run(run: Path) -> None:
    rewrite(run, lambda rows: [*rows, rows[-1]._replace(key="another")])
    last = read(f"sqlite:///{run}/ledger.db")[0][-1]
    end = {"sequence": last.seq, "head": last.hash}
    edit(run / "out" / "privacy_report.json", lambda r: r["ledger"].update(end))
    assert "out: the report names an entry that does not end this run" in found(run)


def test_output_without_its_run(run: Path) -> None:
    (run / "out" / "run.json").unlink()
    assert found(run) == ["out: there is output without a run.json"]


def test_charges_that_shrink_between_two_recounts(run: Path, tmp_path: Path) -> None:
    """The ledger is whole in itself: it was put back to an earlier state."""
    url, since = f"sqlite:///{run}/ledger.db", tmp_path / "since"
    assert recount(url, [], since) == [] == recount(url, [], since)
    rewrite(run, lambda rows: rows[:2])
    assert recount(url, []) == []
    assert recount(url, [], since) == ["data set 'notes': entries are gone that were there before"]


def test_steps_that_were_repeated_and_not_charged() -> None:
    step = {"type": "poisson_subsampled_gaussian", "sampling_probability": 0.5}
    event = {"type": "composed", "events": [{"type": "self_composed", "count": 4, "event": step}]}
    assert module._charged_steps(event) == 4 == module._steps("steps-001-004")
    assert module._steps("votes-0001") == 0
