"""Recounts a ledger and the runs that were charged to it, without a line of dpray's code.

    python recount.py LEDGER [RUN ...] [--since FILE]

LEDGER is the URL of an SQLite file or a PostgreSQL database, each RUN an output folder of a run,
finished or not. Every fault is printed in a line; the exit code is 1 if there is one. `--since`
names a file with the ends of the chains at the last recount: entries that were there may not be
gone, and the file is written anew.

An SQLite file is copied before it is read, so that a recount repairs nothing that a crash has left.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sqlite3
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

COLUMNS = "dataset, seq, kind, key, unit, attempt, at, payload, prev_hash, hash"

QUERIES = {
    "dpray_entries": f"SELECT {COLUMNS} FROM dpray_entries ORDER BY dataset, seq",
    "dpray_datasets": "SELECT name, length, head, reservations FROM dpray_datasets",
}

RELEASED = ("synthetic.jsonl", "privacy_report.json")

CLOSE = Fraction(1, 10**9)
"""Sums may differ by this share of them: what is compared was rounded when it was written."""


class Entry(NamedTuple):
    """One row of the table `dpray_entries`."""

    dataset: str
    seq: int
    kind: str
    key: str
    unit: str
    attempt: str
    at: str
    payload: str
    prev_hash: str
    hash: str

    @property
    def values(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.payload)
        return found


class End(NamedTuple):
    """One row of the table `dpray_datasets`."""

    name: str
    length: int
    head: str
    reservations: int


class Money(NamedTuple):
    """An epsilon and a delta, or a sum of several."""

    epsilon: Fraction
    delta: Fraction

    @classmethod
    def of(cls, values: dict[str, Any]) -> Money:
        return cls(Fraction(str(values["epsilon"])), Fraction(str(values["delta"])))

    def plus(self, other: Money) -> Money:
        return Money(self.epsilon + other.epsilon, self.delta + other.delta)

    def is_within(self, bound: Money) -> bool:
        return all(mine <= most * (1 + CLOSE) for mine, most in zip(self, bound, strict=True))

    def __str__(self) -> str:
        return f"({float(self.epsilon):.9g}, {float(self.delta):.9g})"


NOTHING = Money(Fraction(0), Fraction(0))


def total(reservations: list[Entry]) -> Money:
    found = NOTHING
    for entry in reservations:
        found = found.plus(Money.of(entry.values))
    return found


def read(url: str) -> tuple[list[Entry], list[End]]:
    """Return all entries, chain by chain, and the ends that the ledger has written down. A table
    that is not there has no rows: a crash may leave an SQLite file without tables."""
    if url.startswith("sqlite:///"):
        rows, ends = _read_copy(Path(url.removeprefix("sqlite:///")))
    else:
        import psycopg

        with psycopg.connect(url) as connection:
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            rows, ends = (connection.execute(query).fetchall() for query in QUERIES.values())
    # A database may sort names by another rule than Python.
    entries = sorted((Entry(*row) for row in rows), key=lambda entry: (entry.dataset, entry.seq))
    return entries, [End(*row) for row in ends]


def _read_copy(file: Path) -> list[list[Any]]:
    with tempfile.TemporaryDirectory() as folder:
        for name in (file.name, f"{file.name}-wal"):
            if (file.parent / name).exists():
                shutil.copy(file.parent / name, folder)
        with closing(sqlite3.connect(Path(folder) / file.name)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
            return [
                connection.execute(query).fetchall() if table in tables else []
                for table, query in QUERIES.items()
            ]


# The chains


def chain_faults(entries: list[Entry], ends: list[End]) -> Iterator[str]:
    """Yield what is wrong with the hashes, the numbers and the ends of the chains."""
    named = {end.name: end for end in ends}
    for dataset, rows in groupby(entries, key=lambda entry: entry.dataset):
        chain, place = list(rows), f"data set '{dataset}'"
        head = "0" * 64
        for number, entry in enumerate(chain):
            if entry.seq != number:
                yield f"{place}: entry {number} is missing"
                break
            content = json.dumps([*list(entry[:-2]), head], separators=(",", ":"))
            if (
                entry.prev_hash != head
                or hashlib.sha256(content.encode()).hexdigest() != entry.hash
            ):
                yield f"{place}: entry {number} does not have the hash of its content"
                break
            head = entry.hash
        reservations = sum(entry.kind == "reserve" for entry in chain)
        if named.pop(dataset, None) != (dataset, len(chain), chain[-1].hash, reservations):
            yield f"{place}: its chain does not end where the ledger says"
    yield from (f"data set '{name}': it has no entries" for name in named)


def shrunk(entries: list[Entry], since: dict[str, Any]) -> Iterator[str]:
    """Yield the data sets that have lost entries which an earlier recount saw."""
    places = {(entry.dataset, entry.seq): entry for entry in entries}
    for dataset, (length, head) in since.items():
        last = places.get((dataset, length - 1))
        if last is None or last.hash != head:
            yield f"data set '{dataset}': entries are gone that were there before"


# The charges and the units


def dataset_faults(chain: list[Entry]) -> Iterator[str]:
    """Yield what is wrong with one data set's charges and its runs' units."""
    place = f"data set '{chain[0].dataset}'"
    if [entry.kind for entry in chain].count("create") != 1 or chain[0].kind != "create":
        yield f"{place}: it was not made once, in its first entry"
        return
    terms = chain[0].values
    spent = total([entry for entry in chain if entry.kind == "reserve"])
    if terms["composition"] == "basic" and not spent.is_within(budget := Money.of(terms["budget"])):
        yield f"{place}: {spent} is charged, its budget is {budget}"
    runs: dict[str, list[Entry]] = {}
    for entry in chain:
        if entry.kind not in ("create", "data"):
            runs.setdefault(entry.key, []).append(entry)
    for key, rows in runs.items():
        yield from (f"run '{key}': {fault}" for fault in _run_faults(rows))


def _run_faults(rows: list[Entry]) -> Iterator[str]:
    if [entry.kind for entry in rows].count("reserve") != 1 or rows[0].kind != "reserve":
        yield "it was not charged once, before all else"
    begun: set[str] = set()
    ended: dict[str, str] = {}
    for number, entry in enumerate(rows):
        unit, kind = entry.unit, entry.kind
        if kind == "commit" and number != len(rows) - 1:
            yield "something follows its commit"
        elif kind == "begin":
            if unit in ended:
                yield f"'{unit}' was begun although it had ended ({ended[unit]})"
            begun.add(unit)
        elif kind in ("publish", "fail"):
            if unit in ended:
                yield f"'{unit}' ended twice ({ended[unit]}, {kind})"
            if unit not in begun:  # by any attempt: a worker begins what the driver publishes
                yield f"'{unit}' ended ({kind}) before it was begun"
            ended[unit] = kind


# The runs' folders


def folder_faults(folder: Path, entries: list[Entry]) -> Iterator[str]:
    """Yield where a run's folder says something else than the ledger."""
    if not (folder / "run.json").exists():
        parts = list((folder / "private" / "parts").glob("*"))
        if parts or (folder / "synthetic.jsonl").exists():
            yield "there is output without a run.json"
        return
    run = json.loads((folder / "run.json").read_text())
    key, state = run["run_id"], run["state"]
    own = [entry for entry in entries if entry.key == key]
    # A training pays for what it repeats under keys of their own.
    charges = [e for e in entries if e.kind == "reserve" and _belongs(e.key, key)]
    published = {entry.unit: entry.values for entry in own if entry.kind == "publish"}
    committed = any(entry.kind == "commit" for entry in own)
    if charges and state == "planned":
        yield "run.json says that nothing is charged, and the ledger has a charge"
    if not charges and state in ("reserved", "finished"):
        yield "run.json says that the run is charged, and the ledger has no charge"
        return
    shas = {release["sha256"] for release in published.values()}
    for part in sorted((folder / "private" / "parts").glob("*")):
        if hashlib.sha256(part.read_bytes()).hexdigest() not in shas:
            yield f"{part.name} was published, and the ledger does not know of it"
    if state == "finished" or (folder / "privacy_report.json").exists():
        missing = [name for name in RELEASED if not (folder / name).exists()]
        yield from (f"it is finished, and {name} is missing" for name in missing)
        if missing:
            return
        if not committed:
            yield "it has a report, and the ledger says that it is not over"
        yield from _report_faults(folder, own, charges, entries)


def _belongs(charge: str, run: str) -> bool:
    return charge == run or charge.startswith(f"{run}/")


def _report_faults(
    folder: Path, own: list[Entry], charges: list[Entry], entries: list[Entry]
) -> Iterator[str]:
    report = json.loads((folder / "privacy_report.json").read_text())
    stated, paid = Money.of(report), total(charges)
    if not total(charges[:1]).is_within(stated):
        yield f"the report states {stated}, less than its first charge {total(charges[:1])}"
    if not stated.is_within(paid):
        yield f"the report states {stated}, more than its charges {paid}"
    yield from _account_faults(report["ledger"], own, entries)
    published = [entry.unit for entry in own if entry.kind == "publish" and entry.unit != "labels"]
    begun = [entry.unit for entry in own if entry.kind == "begin"]
    lines = (folder / "synthetic.jsonl").read_text().split("\n")[:-1]
    if len(lines) != report["records"]:
        yield f"the report states {report['records']} records, and {len(lines)} are released"
    sources = {json.loads(line).get("batch") for line in lines} - {None}
    if sources - set(published):
        yield "records are released of a batch that is not published"
    if "batches" in report and report["batches"]["published"] != len(published):
        yield f"the report states {report['batches']['published']} units, not {len(published)}"
    if "steps" in report:
        steps = sum(map(_steps, begun))
        stated_steps = report["steps"]["charged"]
        if not steps <= stated_steps <= sum(_charged_steps(e.values["event"]) for e in charges):
            yield f"{steps} steps were begun, the report states {stated_steps}"
    again = Counter(begun)
    if "batches" in report:
        repeated = sum(times > 1 for unit, times in again.items() if unit != "labels")
        if report["batches"]["repeated"] != repeated:
            yield f"the report states {report['batches']['repeated']} repeats, not {repeated}"


def _account_faults(
    stated: dict[str, Any], own: list[Entry], entries: list[Entry]
) -> Iterator[str]:
    place = ("commit", stated["dataset"], stated["sequence"], stated["head"])
    ends = [entry for entry in own if (entry.kind, entry.dataset, entry.seq, entry.hash) == place]
    if not ends:
        yield "the report names an entry that does not end this run"
        return
    [last] = ends
    chain = [entry for entry in entries if entry.dataset == last.dataset]
    reservations = [entry for entry in chain if entry.kind == "reserve"]
    until = total([entry for entry in reservations if entry.seq < last.seq])
    spent, left = Money.of(stated["spent"]), Money.of(stated["left"])
    if chain[0].values["composition"] != "basic":
        return
    if not (until.is_within(spent) and spent.is_within(total(reservations))):
        yield f"the report states that {spent} is spent, and the charges add up to {until}"
    if not spent.plus(left).is_within(Money.of(chain[0].values["budget"])):
        yield "what the report states as spent and as left is more than the budget"


def _steps(unit: str) -> int:
    """Return the number of a training's steps in a block, such as 5 in `steps-006-010`."""
    kind, *numbers = unit.split("-")
    return int(numbers[1]) - int(numbers[0]) + 1 if kind == "steps" else 0


def _charged_steps(event: Any, times: int = 1) -> int:
    """Return how often an event runs the mechanism of a training's step."""
    if isinstance(event, list):
        return sum(_charged_steps(each, times) for each in event)
    if not isinstance(event, dict):
        return 0
    if event.get("type") == "poisson_subsampled_gaussian":
        return times
    times *= event.get("count", 1)
    return sum(_charged_steps(each, times) for each in event.values())


def recount(url: str, folders: list[Path], since: Path | None = None) -> list[str]:
    """Return all faults, one line each."""
    entries, ends = read(url)
    faults = list(chain_faults(entries, ends))
    for _, chain in groupby(entries, key=lambda entry: entry.dataset):
        faults += dataset_faults(list(chain))
    for folder in folders:
        faults += (f"{folder.name}: {fault}" for fault in folder_faults(folder, entries))
    if since is not None:
        if since.exists():
            faults += shrunk(entries, json.loads(since.read_text()))
        since.write_text(json.dumps({end.name: [end.length, end.head] for end in ends}))
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ledger")
    parser.add_argument("run", nargs="*", type=Path)
    parser.add_argument("--since", type=Path)
    asked = parser.parse_args()
    faults = recount(asked.ledger, asked.run, asked.since)
    print("\n".join(faults))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
