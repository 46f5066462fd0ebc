"""A `LedgerView` reads a ledger: accounts, listings of batches, `verify`, `show` and `export`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import sqlalchemy as sa

from dpray.accounting.composition import Charge
from dpray.ledger import queries
from dpray.ledger.account import Account, admit, committed, read_account, read_lineage
from dpray.ledger.audit import problems, summaries
from dpray.ledger.chain import Entry
from dpray.ledger.queries import PAGE, Listing, Place
from dpray.ledger.schema import entries
from dpray.ledger.store import LedgerConflict, Store
from dpray.types import Budget


class LedgerView:
    """Reads the budgets at a URL, `sqlite:///path` or `postgresql://...`.

    Every method raises `LedgerError` if the database fails (lost connection, locked for too long).
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    @classmethod
    def open(cls, url: str) -> Self:
        """Open a ledger that is there. Raises `MissingLedger` if it is not; none is made."""
        return cls(Store(url, create=False))

    @classmethod
    def create_or_open(cls, url: str) -> Self:
        """Open the ledger at `url`, and make it if it is not there."""
        return cls(Store(url, create=True))

    def __str__(self) -> str:
        """Return the URL, without its password."""
        return str(self._store)

    def close(self) -> None:
        self._store.close()

    def account(self, dataset: str) -> Account | None:
        """Return a data set's budget and charges, or None if it has no budget."""
        with self._store.read() as connection:
            name = queries.stored_name(connection, dataset)
            return None if name is None else read_account(connection, name)

    def check(
        self, dataset: str, charge: Charge, privacy_unit: str, neighboring_relation: str
    ) -> None:
        """Look whether a charge would be made now, and make none. Raises as `Ledger.reserve`."""
        with self._store.read() as connection:
            accounts = read_lineage(connection, dataset)
        admit(accounts, charge, privacy_unit, neighboring_relation)

    def committed(self, dataset: str) -> Budget:
        """Return what the finished runs of a data set, by its name in the ledger, add up to."""
        with self._store.read() as connection:
            return committed(connection, dataset)

    def names(self) -> list[str]:
        """Return the names of the data sets that the ledger has."""
        with self._store.read() as connection:
            return queries.dataset_names(connection)

    def is_reserved(self, key: str) -> bool:
        """Return whether this ledger holds the charge with this key."""
        with self._store.read() as connection:
            return queries.find(connection, "reserve", key) is not None

    def last_commit(self, key: str) -> Entry:
        """Return the entry that closed a run, after which none of its own comes. Raises
        `LedgerConflict` if it is not closed."""
        with self._store.read() as connection:
            entry = queries.find(connection, "commit", key)
        if entry is None:
            raise LedgerConflict("the run is not committed")
        return entry

    def holds(self, dataset: str, sequence: int, head: str) -> bool:
        """Return whether an entry with this hash has this place in the data set's chain. Another
        ledger holds no such entry, nor does one that was restored to an earlier state."""
        with self._store.read() as connection:
            place = (entries.c.dataset == dataset, entries.c.seq == sequence)
            entry = queries.first(connection, sa.select(entries).where(*place))
        return entry is not None and entry.hash == entry.digest() == head

    def published(self, key: str) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yield each published unit with (the attempt that published it, its file's SHA-256)."""
        for entry in self._listed("publish", key):
            release = entry.values()
            yield entry.unit, (release["attempt"], release["sha256"])

    def failed(self, key: str) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yield each unit that failed, with (attempt, name of the error's class)."""
        for entry in self._listed("fail", key):
            failure = entry.values()
            yield entry.unit, (failure["attempt"], failure["reason"])

    def started(self, key: str) -> Iterator[Place]:
        """Yield (unit, attempt) of every start; a unit that was repeated comes once for each
        attempt."""
        return ((entry.unit, entry.attempt) for entry in self._listed("begin", key))

    def unfinished(self, key: str) -> Iterator[Place]:
        """Yield the starts of units that neither were published nor failed: under way, or lost."""
        return ((entry.unit, entry.attempt) for entry in self._listed("unfinished", key))

    def _listed(self, listing: Listing, key: str) -> Iterator[Entry]:
        after = ("", "")
        while rows := self.page(listing, key, after):
            yield from rows
            after = (rows[-1].unit, rows[-1].attempt)

    def page(self, listing: Listing, key: str, after: Place, limit: int = PAGE) -> list[Entry]:
        """Return at most `limit` entries of a listing that come after a place, in their order by
        unit and attempt; ("", "") is the beginning."""
        place = sa.tuple_(entries.c.unit, entries.c.attempt)
        kind = "begin" if listing == "unfinished" else listing
        query = (
            sa.select(entries)
            .where(entries.c.kind == kind, entries.c.key == key)
            .where(place > sa.tuple_(*map(sa.literal, after)))
            .order_by(entries.c.unit, entries.c.attempt)
            .limit(limit)
        )
        if listing == "unfinished":
            query = query.where(~queries.outcome("publish"), ~queries.outcome("fail"))
        with self._store.read() as connection:
            return [Entry(**row._mapping) for row in connection.execute(query)]

    def counts(self, key: str) -> dict[str, int]:
        """Return how many units of a run were `started`, `published` and `failed`, how many
        `starts` there were in all, and whether (1 or 0) it is `committed`."""
        with self._store.read() as connection:
            return queries.count(connection, key)

    def verify(self) -> list[str]:
        """Recompute every hash, every cost from its event, and every total. Returns what does not
        fit, one line each."""
        with self._store.read() as connection:
            return list(problems(connection))

    def show(self) -> dict[str, Any]:
        """Return `ledger` (the URL, without its password) and `datasets`, a list: see
        `summaries`."""
        with self._store.read() as connection:
            return {"ledger": str(self), "datasets": summaries(connection)}

    def export(self) -> Iterator[dict[str, Any]]:
        """Yield every entry, data set by data set, in the order of its chain."""
        with self._store.read() as connection:
            yield from (entry.to_json() for entry in queries.all_entries(connection))
