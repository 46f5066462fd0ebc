"""One write to the ledger sees the data sets that it has locked, and what it adds to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any

import sqlalchemy as sa

from dpray.ledger import queries
from dpray.ledger.account import Account, read_account
from dpray.ledger.chain import Chain, Entry
from dpray.ledger.schema import datasets, entries
from dpray.ledger.store import LedgerConflict, LedgerError, broken_chain

CHUNK = 500
"""One statement looks up so many rows."""


def batched(items: Iterable[str], size: int) -> Iterator[list[str]]:
    """Yield lists of at most `size` items."""
    remaining = iter(items)
    while batch := list(islice(remaining, size)):
        yield batch


@dataclass(frozen=True)
class Tip:
    """Holds the end of a data set's chain as this process last saw it committed, and the account up
    to there, where it was read."""

    length: int
    head: str
    account: Account | None


@dataclass
class Seen:
    """Holds what a process has seen committed: the ends of chains, and what never changes: the data
    sets that a name stands for, itself and its ancestors, and the data set of a run, by its key."""

    tips: dict[str, Tip] = field(default_factory=dict)
    lineages: dict[str, list[str]] = field(default_factory=dict)
    runs: dict[str, str] = field(default_factory=dict)


class Transaction:
    """Holds the locked data sets of one transaction.

    A data set whose end is still the one that this process saw last is not read again: its account
    is the one in memory. If the end is another, its entries are read and checked, and the one seen
    last has to be among them: a ledger that was put back to an earlier state is refused, however
    whole it is in itself. Operations add their entries when nothing can refuse them any more, so
    that one that is refused leaves no trace in a transaction that it shares. The entries of all
    operations are written together, at the end; the later operations see them before that.
    """

    def __init__(self, connection: sa.Connection, seen: Seen) -> None:
        self.connection = connection
        self._seen = seen
        self._lineages: dict[str, list[str]] = {}
        self._rows: dict[str, sa.Row[Any]] = {}
        self._chains: dict[str, Chain] = {}
        self._accounts: dict[str, Account] = {}
        self._runs: dict[str, str] = {}
        self._asked: set[str] = set()
        self._reserved: dict[str, Entry] = {}
        self._longer: set[str] = set()
        self._added: dict[tuple[str, str, str, str], Entry] = {}
        """The entries that are not written yet, by kind, key, unit and attempt."""

    def lineage(self, dataset: str) -> list[str]:
        """Return the names of a data set and of its ancestors, itself first. Raises as
        `ledger_queries.lineage`."""
        if (known := self._seen.lineages.get(dataset)) is not None:
            return known
        if dataset not in self._lineages:
            self._lineages[dataset] = queries.lineage(self.connection, dataset)
        return self._lineages[dataset]

    def lock(self, names: Iterable[str]) -> None:
        """Lock these data sets until the transaction ends. One statement locks them in the order of
        their names, which is the same in every transaction: no two can wait for each other."""
        query = sa.select(datasets).where(datasets.c.name.in_(set(names)))
        rows = self.connection.execute(query.order_by(datasets.c.name).with_for_update())
        self._rows |= {row.name: row for row in rows}

    def chain(self, dataset: str) -> Chain:
        """Return the end of a locked chain. Raises `LedgerError` if it is not what was written."""
        if dataset not in self._chains:
            self._chains[dataset] = self._end(dataset)
        return self._chains[dataset]

    def account(self, dataset: str) -> Account:
        """Return the account of a locked data set. Raises `LedgerError` if an entry that counts was
        altered or is missing."""
        self.chain(dataset)
        if dataset not in self._accounts:
            self.write_ends()
            if (account := read_account(self.connection, dataset)) is None:
                raise broken_chain(dataset)
            self._accounts[dataset] = account
        return self._accounts[dataset]

    def add(self, *chains: Chain, accounts: Iterable[Account] = ()) -> None:
        """Write the new entries of these chains; `accounts` are what they add up to. Nothing may
        refuse the operation from here on: others share the transaction."""
        for chain in chains:
            for entry in chain.added:
                self._added[entry.kind, entry.key, entry.unit, entry.attempt] = entry
            if any(entry.kind in ("create", "reserve") for entry in chain.added):
                self._accounts.pop(chain.dataset, None)
            if chain.added:
                chain.added.clear()
                self._longer.add(chain.dataset)
        self._accounts |= {account.dataset: account for account in accounts}

    def add_dataset(self, chain: Chain) -> None:
        """Write a new data set."""
        self.connection.execute(sa.insert(datasets), {"name": chain.dataset, **chain.end})
        self._chains[chain.dataset] = chain
        self.add(chain)

    def run(self, key: str) -> str:
        """Return the data set that a run, which has this reservation, is charged to. Raises
        `LedgerConflict` if there is none."""
        if (dataset := self._seen.runs.get(key) or self._runs.get(key)) is None:
            if (entry := self.find("reserve", key)) is None:
                raise LedgerConflict(f"the ledger has no reservation '{key}'")
            dataset = self._runs[key] = entry.dataset
        return dataset

    def find(self, kind: str, key: str) -> Entry | None:
        """Return what `ledger_queries.find` does, with the entries that are not written yet."""
        added = self._added.get((kind, key, "", ""))
        return queries.find(self.connection, kind, key) if added is None else added

    def ask(self, keys: Iterable[str]) -> None:
        """Note, before the data sets are locked, that `reserved` will be asked for these keys: its
        first call looks up those of all operations at once."""
        self._asked.update(keys)

    def reserved(self, key: str) -> Entry | None:
        """Return the reservation of a key that was asked for, or None."""
        for chunk in batched(self._asked, CHUNK):
            self._reserved |= queries.reservations(self.connection, chunk)
        self._asked.clear()
        return self._added.get(("reserve", key, "", "")) or self._reserved.get(key)

    def owners(self, digests: Sequence[str]) -> dict[str, str]:
        """Return the data sets of those of the files' digests that are bound to one."""
        found: dict[str, str] = {}
        for chunk in batched(digests, CHUNK):
            query = sa.select(entries.c.key, entries.c.dataset).where(
                entries.c.kind == "data", entries.c.key.in_(chunk)
            )
            found |= {row.key: row.dataset for row in self.connection.execute(query)}
        for digest in digests:
            if (entry := self._added.get(("data", digest, "", ""))) is not None:
                found[digest] = entry.dataset
        return found

    def begun(self, key: str, units: Sequence[str], attempt: str) -> set[str]:
        """Return what `ledger_queries.begun` does, with the entries that are not written yet."""
        found = {unit for unit in units if ("begin", key, unit, attempt) in self._added}
        for chunk in batched(units, CHUNK):
            found |= queries.begun(self.connection, key, chunk, attempt)
        return found

    def outcomes(self, key: str, units: Sequence[str]) -> dict[tuple[str, str], dict[str, Any]]:
        """Return what `ledger_queries.outcomes` does, with the entries that are not written yet."""
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for chunk in batched(units, CHUNK):
            found |= queries.outcomes(self.connection, key, chunk)
        for kind, of in (*product(("publish", "fail"), units), ("commit", "")):
            if (entry := self._added.get((kind, key, of, ""))) is not None:
                found[kind, of] = entry.values()
        return found

    def write_ends(self) -> None:
        """Write the new entries, and the new ends of all chains."""
        if self._added:
            rows = [vars(entry) for entry in self._added.values()]
            self.connection.execute(sa.insert(entries), rows)
            own = (entry for entry in self._added.values() if entry.kind == "reserve")
            self._reserved |= {entry.key: entry for entry in own if not entry.unit}
            self._added.clear()
        ends = [{"own": name, **self._chains[name].end} for name in sorted(self._longer)]
        if ends:
            row = sa.update(datasets).where(datasets.c.name == sa.bindparam("own"))
            values: dict[str, Any] = {name: sa.bindparam(name) for name in ends[0]}
            del values["own"]
            self.connection.execute(row.values(values), ends)
        self._longer.clear()

    def remember(self) -> None:
        """Keep what this transaction has seen; it has to be committed."""
        self._seen.lineages |= self._lineages
        self._seen.runs |= self._runs
        self._seen.tips |= {
            name: Tip(chain.length, chain.head, self._accounts.get(name))
            for name, chain in self._chains.items()
        }

    def _end(self, dataset: str) -> Chain:
        row, tip = self._rows.get(dataset), self._seen.tips.get(dataset)
        if row is None:
            raise broken_chain(dataset)
        chain = Chain(dataset, row.length, row.head, row.reservations)
        if tip is not None and (tip.length, tip.head) == (row.length, row.head):
            if tip.account is not None:
                self._accounts[dataset] = tip.account
            return chain
        own = sa.select(entries).where(entries.c.dataset == dataset)
        if tip is not None:
            before = queries.first(self.connection, own.where(entries.c.seq == tip.length - 1))
            if before is None or before.hash != tip.head:
                raise LedgerError(
                    f"the ledger's entries of '{dataset}' are not those that were there before: it "
                    "was put back to an earlier state, or replaced by another; nothing is charged "
                    "to it until somebody has looked (see `dpray ledger verify --contains`)"
                )
        last = queries.first(self.connection, own.order_by(entries.c.seq.desc()).limit(1))
        ends = None if last is None else (last.seq + 1, last.hash, last.digest())
        if ends != (row.length, row.head, row.head):
            raise broken_chain(dataset)
        return chain
