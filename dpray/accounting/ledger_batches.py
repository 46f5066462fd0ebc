"""Listings of a run's batches, in pages: a run may have a million of them.

`BatchListings` turns pages into iterators, for the ledger itself and for the accountant actor's
client alike.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Literal

import sqlalchemy as sa

from dpray.accounting.hash_chain import Entry
from dpray.accounting.ledger_schema import entries

Listing = Literal["started", "unfinished", "published", "failed"]
Place = tuple[str, str]
"""(unit, attempt) of the last row of a page."""

PAGE = 10_000

_KINDS: dict[Listing, str] = {
    "started": "begin",
    "unfinished": "begin",
    "published": "publish",
    "failed": "fail",
}


class BatchListings(ABC):
    """What became of a run's batches, one at a time and in a fixed order."""

    @abstractmethod
    def page(self, listing: Listing, key: str, after: Place, limit: int = PAGE) -> list[Entry]:
        """At most `limit` rows of a listing that come after a place; ("", "") is the beginning."""

    def published(self, key: str) -> Iterator[tuple[str, tuple[str, str]]]:
        """Each published unit with (the attempt that published it, the SHA-256 of its file)."""
        for entry in self._entries("published", key):
            release = entry.values()
            yield entry.unit, (release["attempt"], release["sha256"])

    def failed(self, key: str) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yield each unit that failed, with (attempt, name of the error's class)."""
        for entry in self._entries("failed", key):
            failure = entry.values()
            yield entry.unit, (failure["attempt"], failure["reason"])

    def started(self, key: str) -> Iterator[Place]:
        """(unit, attempt) of every start; a unit that was repeated comes once for each attempt."""
        for entry in self._entries("started", key):
            yield entry.unit, entry.attempt

    def unfinished(self, key: str) -> Iterator[Place]:
        """The starts of units that neither were published nor failed: under way, or lost."""
        for entry in self._entries("unfinished", key):
            yield entry.unit, entry.attempt

    def _entries(self, listing: Listing, key: str) -> Iterator[Entry]:
        after = ("", "")
        while rows := self.page(listing, key, after):
            yield from rows
            after = (rows[-1].unit, rows[-1].attempt)


def read_page(
    connection: sa.Connection, listing: Listing, key: str, after: Place, limit: int
) -> list[Entry]:
    """See `BatchListings.page`."""
    place = sa.tuple_(entries.c.unit, entries.c.attempt)
    query = (
        sa.select(entries)
        .where(entries.c.kind == _KINDS[listing], entries.c.key == key)
        .where(place > sa.tuple_(*map(sa.literal, after)))
        .order_by(entries.c.unit, entries.c.attempt)
        .limit(limit)
    )
    if listing == "unfinished":
        query = query.where(~_outcome("publish"), ~_outcome("fail"))
    return [Entry(**row._mapping) for row in connection.execute(query)]


def count(connection: sa.Connection, key: str) -> dict[str, int]:
    """Units started, starts in all, units published, units failed, and whether (1 or 0) the run is
    committed."""

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
    """Return the one entry of this kind and key, or None."""
    query = sa.select(entries).where(entries.c.kind == kind, entries.c.key == key)
    row = connection.execute(query).first()
    return None if row is None else Entry(**row._mapping)


def find_units(
    connection: sa.Connection, kind: str, key: str, units: list[str], attempt: str = ""
) -> dict[str, dict[str, Any]]:
    """Return the payloads of those units that have an entry of this kind."""
    query = sa.select(entries.c.unit, entries.c.payload).where(
        entries.c.kind == kind,
        entries.c.key == key,
        entries.c.unit.in_(units),
        entries.c.attempt == attempt,
    )
    return {unit: json.loads(payload) for unit, payload in connection.execute(query)}


def _outcome(kind: str) -> sa.Exists:
    other = entries.alias()
    return sa.exists().where(
        other.c.kind == kind, other.c.key == entries.c.key, other.c.unit == entries.c.unit
    )
