"""This module holds the ledger's queries."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import sqlalchemy as sa

from dpray.ledger.chain import Entry
from dpray.ledger.schema import ACCOUNT, account_index, datasets, entries
from dpray.ledger.store import broken_chain
from dpray.types import InputError

Listing = Literal["begin", "unfinished", "publish", "fail"]
"""It is a kind of entries, or the `begin`s of units with neither of the other two."""

Place = tuple[str, str]
"""Holds the (unit, attempt) of the last row of a page."""

PAGE = 10_000
"""A run may have a million batches, so they are listed in pages of this size."""
ROWS_AT_A_TIME = 2_000

# Made once: every operation asks them, and making one takes as long as asking it.
_OF_KEY = (entries.c.kind == sa.bindparam("kind"), entries.c.key == sa.bindparam("key"))
_OWN = sa.select(entries).where(*_OF_KEY, entries.c.unit == "")
_RESERVATIONS = sa.select(entries).where(
    entries.c.kind == "reserve",
    entries.c.key.in_(sa.bindparam("keys", expanding=True)),
    entries.c.unit == "",
)
_BEGUN = sa.select(entries.c.unit).where(
    *_OF_KEY,
    entries.c.unit.in_(sa.bindparam("units", expanding=True)),
    entries.c.attempt == sa.bindparam("attempt"),
)
_OUTCOMES = sa.select(entries.c.kind, entries.c.unit, entries.c.payload).where(
    entries.c.kind.in_(("publish", "fail", "commit")),
    entries.c.key == sa.bindparam("key"),
    entries.c.unit.in_(sa.bindparam("units", expanding=True)),
    entries.c.attempt == "",
)


def outcome(kind: str) -> sa.Exists:
    """Return the condition that the run has an entry of this kind for the unit."""
    other = entries.alias()
    return sa.exists().where(
        other.c.kind == kind, other.c.key == entries.c.key, other.c.unit == entries.c.unit
    )


def count(connection: sa.Connection, key: str) -> dict[str, int]:
    """Return how many units were `started`, `published` and `failed`, how many `starts` there were
    in all, and whether (1 or 0) the run is `committed`."""

    def number(kind: str, what: sa.ColumnElement[int]) -> int:
        query = sa.select(what).where(entries.c.kind == kind, entries.c.key == key)
        return int(connection.execute(query).scalar_one())

    return {
        "started": number("begin", sa.func.count(entries.c.unit.distinct())),
        "starts": number("begin", sa.func.count()),
        "published": number("publish", sa.func.count()),
        "failed": number("fail", sa.func.count()),
        "committed": number("commit", sa.func.count()),
    }


def find(connection: sa.Connection, kind: str, key: str) -> Entry | None:
    """Return the one entry of this kind and key, or None. (An entry with a unit is a tenant's, or
    is drawn on a parent.)"""
    row = connection.execute(_OWN, {"kind": kind, "key": key}).first()
    return None if row is None else Entry(**row._mapping)


def reservations(connection: sa.Connection, keys: list[str]) -> dict[str, Entry]:
    """Return the reservations of those of the keys that have one."""
    rows = connection.execute(_RESERVATIONS, {"keys": keys})
    return {row.key: Entry(**row._mapping) for row in rows}


def first(connection: sa.Connection, query: sa.Select[Any]) -> Entry | None:
    """Return the first entry of a query, or None."""
    row = connection.execute(query).first()
    return None if row is None else Entry(**row._mapping)


def begun(connection: sa.Connection, key: str, units: list[str], attempt: str) -> set[str]:
    """Return those of the units that this attempt has begun."""
    place = {"kind": "begin", "key": key, "units": units, "attempt": attempt}
    return {unit for (unit,) in connection.execute(_BEGUN, place)}


def outcomes(
    connection: sa.Connection, key: str, units: list[str]
) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the payloads of the run's entries `publish` and `fail` for these units, and of its
    `commit`, by kind and unit; the unit of a commit is ""."""
    rows = connection.execute(_OUTCOMES, {"key": key, "units": [*units, ""]})
    return {(kind, unit): json.loads(payload) for kind, unit, payload in rows}


def counted_entries(connection: sa.Connection, dataset: str) -> list[Entry]:
    """Return the entries of a data set's account (create and reserve), in their order."""
    # A data set may have a million other rows, and SQLite would rather walk over them by their key.
    by_index = f"INDEXED BY {account_index.name}" if connection.dialect.name == "sqlite" else ""
    query = sa.text(
        f"SELECT {', '.join(entries.c.keys())} FROM {entries.name} {by_index} "
        f"WHERE dataset = :dataset AND {ACCOUNT} ORDER BY seq"
    )
    return [Entry(*row) for row in connection.execute(query, {"dataset": dataset})]


def all_entries(connection: sa.Connection) -> Iterator[Entry]:
    """Yield every entry, ordered by data set and place in its chain, without holding them all."""
    query = sa.select(entries).order_by(entries.c.dataset, entries.c.seq)
    for row in connection.execute(query.execution_options(yield_per=ROWS_AT_A_TIME)):
        yield Entry(**row._mapping)


def dataset_names(connection: sa.Connection) -> list[str]:
    """Return the names of the data sets, in order."""
    query = sa.select(datasets.c.name).order_by(datasets.c.name)
    return list(connection.execute(query).scalars())


def stored_name(connection: sa.Connection, name: str) -> str | None:
    """Return the name in the ledger of the data set that `name` means: case and the number of
    blanks make no other data set. None if the ledger has no such data set.

    Raises `InputError` if an older ledger has several such names, and none equals `name`.
    """
    made = sa.select(entries.c.dataset).where(entries.c.kind == "create")
    known = set(connection.execute(sa.union(sa.select(datasets.c.name), made)).scalars())
    if name in known:
        return name
    alike = sorted(other for other in known if folded(other) == folded(name))
    if len(alike) > 1:
        raise InputError(f"the ledger has {', '.join(map(repr, alike))}: write one as it is there")
    return alike[0] if alike else None


def lineage(connection: sa.Connection, dataset: str) -> list[str]:
    """Return the names in the ledger of a data set and of its ancestors, itself first. A parent is
    named once, when its child is made, and has to be there already: there is no cycle.

    Raises `InputError` for a data set that the ledger does not have, and `LedgerError` if a first
    entry was altered.
    """
    if (own := stored_name(connection, dataset)) is None:
        raise InputError(f"the ledger has no data set {dataset!r}")
    names = [own]
    while (parent := _parent(connection, names[-1])) is not None:
        if parent in names:
            raise broken_chain(parent)
        names.append(parent)
    return names


def _parent(connection: sa.Connection, dataset: str) -> str | None:
    create = find(connection, "create", dataset)
    if create is None or create.dataset != dataset or create.hash != create.digest():
        raise broken_chain(dataset)
    parent: str | None = create.values().get("parent")
    return parent


def folded(name: str) -> str:
    return " ".join(name.split()).casefold()
