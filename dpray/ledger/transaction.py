"""The ledger's data as one transaction sees it: queries, and the chains of a write."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import sqlalchemy as sa

from dpray.ledger.account import Account
from dpray.ledger.chain import Chain, Entry, folded
from dpray.ledger.errors import LedgerConflict, LedgerError, broken_chain
from dpray.ledger.store import ACCOUNT, account_index, datasets, entries
from dpray.types import InputError

CHUNK = 500
"""One statement looks up at most this many rows."""
ROWS_AT_A_TIME = 2_000

# Made once: every operation asks them, and making one takes as long as asking it.
_OF_KEY = (entries.c.kind == sa.bindparam("kind"), entries.c.key == sa.bindparam("key"))
_OWN = sa.select(entries).where(*_OF_KEY, entries.c.unit == "")
_WITH_KEYS = sa.select(entries).where(
    entries.c.kind == sa.bindparam("kind"),
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
_END = sa.select(datasets).where(datasets.c.name == sa.bindparam("name"))
_INSERT = sa.insert(entries)
_SET_END = (
    sa.update(datasets)
    .where(datasets.c.name == sa.bindparam("own"))
    .values({name: sa.bindparam(name) for name in Chain("").end})
)

Outcomes = dict[tuple[str, str], dict[str, str]]
"""By kind and unit, the payloads of the entries that end something: a unit (`publish`, `fail`) or
the run (`commit`, whose unit is "")."""


def first(connection: sa.Connection, query: sa.Select[Any]) -> Entry | None:
    """Return the first entry of a query, or None."""
    row = connection.execute(query).first()
    return None if row is None else Entry(**row._mapping)


def find(connection: sa.Connection, kind: str, key: str) -> Entry | None:
    """Return the one entry of this kind and key, or None. (An entry with a unit is a tenant's, or
    is drawn on a parent.)"""
    row = connection.execute(_OWN, {"kind": kind, "key": key}).first()
    return None if row is None else Entry(**row._mapping)


def find_all(connection: sa.Connection, kind: str, keys: Iterable[str]) -> dict[str, Entry]:
    """Return, by key, what `find` returns for each of the keys that has an entry."""
    return {
        row.key: Entry(**row._mapping)
        for chunk in _batched(keys)
        for row in connection.execute(_WITH_KEYS, {"kind": kind, "keys": chunk})
    }


def dataset_names(connection: sa.Connection) -> list[str]:
    """Return the names of the data sets, in order."""
    query = sa.select(datasets.c.name).order_by(datasets.c.name)
    return list(connection.execute(query).scalars())


def stored_name(connection: sa.Connection, name: str) -> str | None:
    """Return the ledger's spelling of a data set's name, or None if it has no such data set."""
    made = sa.select(entries.c.dataset).where(entries.c.kind == "create")
    known = connection.execute(sa.union(sa.select(datasets.c.name), made)).scalars()
    return next((other for other in known if folded(other) == folded(name)), None)


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


def read_account(connection: sa.Connection, dataset: str) -> Account:
    """Return the account of a data set, by its name in the ledger. Work grows with the number of
    its runs, not of units, nor of other data sets. Raises `LedgerError` if an entry that counts was
    altered or is missing."""
    rows = counted_entries(connection, dataset)
    query = sa.select(datasets.c.reservations).where(datasets.c.name == dataset)
    if (
        not rows
        or rows[0].kind != "create"
        or connection.execute(query).scalar() != len(rows) - 1
        or any(entry.hash != entry.digest() for entry in rows)
    ):
        raise broken_chain(dataset)
    return Account.replay(rows)


@dataclass(frozen=True)
class Tip:
    """The end of a data set's chain as this process last saw it committed, and the account up to
    there if it was read."""

    length: int
    head: str
    account: Account | None


@dataclass
class Seen:
    """Committed facts that a process has read: the ends of chains, and what never changes: the
    lineage of a data set by any spelling of its name, and the data set of a run by its key."""

    tips: dict[str, Tip] = field(default_factory=dict)
    lineages: dict[str, list[str]] = field(default_factory=dict)
    runs: dict[str, str] = field(default_factory=dict)

    def forget_uncommitted(self) -> None:
        """Forget what a transaction that failed may have read of its own changes."""
        self.lineages.clear()
        self.runs.clear()


class Transaction:
    """The data sets in one transaction that writes. No other one writes meanwhile.

    A data set whose end is still the one that this process saw last is not read again: its account
    is the one in memory. If the end is another, the one seen last has to be among the entries: a
    ledger that was put back to an earlier state is refused, however whole it is in itself. An
    operation adds its entries when nothing can refuse it any more, so that a refused one leaves no
    trace in a transaction that it shares.
    """

    def __init__(self, connection: sa.Connection, seen: Seen) -> None:
        self.connection, self._seen = connection, seen
        self._chains: dict[str, Chain] = {}
        self._accounts: dict[str, Account] = {}
        self._longer: set[str] = set()

    def lineage(self, dataset: str) -> list[str]:
        """Return what `lineage` returns."""
        if dataset not in self._seen.lineages:
            self._seen.lineages[dataset] = lineage(self.connection, dataset)
        return self._seen.lineages[dataset]

    def dataset_of(self, key: str) -> str:
        """Return the data set that a run is charged to. Raises `LedgerConflict` if it has no
        reservation."""
        if key not in self._seen.runs:
            if (entry := find(self.connection, "reserve", key)) is None:
                raise LedgerConflict(f"the ledger has no reservation '{key}'")
            self._seen.runs[key] = entry.dataset
        return self._seen.runs[key]

    def chain(self, dataset: str) -> Chain:
        """Return the end of a chain. Raises `LedgerError` if it is not what was written."""
        if dataset not in self._chains:
            self._chains[dataset] = self._end(dataset)
        return self._chains[dataset]

    def account(self, dataset: str) -> Account:
        """Return the account of a data set. Raises `LedgerError` if an entry that counts was
        altered or is missing."""
        self.chain(dataset)
        if dataset not in self._accounts:
            self._accounts[dataset] = read_account(self.connection, dataset)
        return self._accounts[dataset]

    def add(self, *chains: Chain, accounts: Iterable[Account] = ()) -> None:
        """Write the new entries of these chains; `accounts` are what they add up to. Nothing may
        refuse the operation from here on."""
        if rows := [vars(entry) for chain in chains for entry in chain.added]:
            self.connection.execute(_INSERT, rows)
        for chain in chains:
            if chain.added:
                chain.added.clear()
                self._longer.add(chain.dataset)
        self._accounts |= {account.dataset: account for account in accounts}

    def add_dataset(self, chain: Chain) -> None:
        """Write a new data set."""
        self.connection.execute(sa.insert(datasets), {"name": chain.dataset, **chain.end})
        self._chains[chain.dataset] = chain
        self.add(chain)

    def open_run(self, key: str, units: Sequence[str]) -> tuple[Chain, Outcomes]:
        """Return the chain of a run, and the outcomes of these units. Raises `LedgerConflict` if
        the run is committed."""
        chain = self.chain(self.dataset_of(key))
        outcomes: Outcomes = {}
        for chunk in _batched(["", *units]):
            rows = self.connection.execute(_OUTCOMES, {"key": key, "units": chunk})
            outcomes |= {(kind, unit): json.loads(payload) for kind, unit, payload in rows}
        if ("commit", "") in outcomes:
            raise LedgerConflict(f"the run '{key}' is committed: nothing more happens under it")
        return chain, outcomes

    def begun(self, key: str, units: Sequence[str], attempt: str) -> set[str]:
        """Return those of the units that this attempt has begun."""
        own = {"kind": "begin", "key": key, "attempt": attempt}
        return {
            unit
            for chunk in _batched(units)
            for (unit,) in self.connection.execute(_BEGUN, own | {"units": chunk})
        }

    def write_ends(self) -> None:
        """Write the new ends of all chains; the last statement before the commit."""
        if self._longer:
            ends = [{"own": name, **self._chains[name].end} for name in sorted(self._longer)]
            self.connection.execute(_SET_END, ends)

    def remember(self) -> None:
        """Keep the ends that this transaction has seen and written; it has to be committed."""
        self._seen.tips |= {
            name: Tip(chain.length, chain.head, self._accounts.get(name))
            for name, chain in self._chains.items()
        }

    def _end(self, dataset: str) -> Chain:
        row = self.connection.execute(_END, {"name": dataset}).first()
        tip = self._seen.tips.get(dataset)
        if row is None:
            raise broken_chain(dataset)
        chain = Chain(dataset, row.length, row.head, row.reservations)
        if tip is not None and (tip.length, tip.head) == (row.length, row.head):
            if tip.account is not None:
                self._accounts[dataset] = tip.account
            return chain
        own = sa.select(entries).where(entries.c.dataset == dataset)
        if tip is not None:
            before = first(self.connection, own.where(entries.c.seq == tip.length - 1))
            if before is None or before.hash != tip.head:
                raise LedgerError(
                    f"the ledger's entries of '{dataset}' are not those that were there before: it "
                    "was put back to an earlier state, or replaced by another; nothing is charged "
                    "to it until somebody has looked (see `dpray ledger verify --contains`)"
                )
        last = first(self.connection, own.order_by(entries.c.seq.desc()).limit(1))
        ends = None if last is None else (last.seq + 1, last.hash, last.digest())
        if ends != (row.length, row.head, row.head):
            raise broken_chain(dataset)
        return chain


def _batched(items: Iterable[str]) -> Iterator[list[str]]:
    remaining = iter(items)
    while batch := list(islice(remaining, CHUNK)):
        yield batch
