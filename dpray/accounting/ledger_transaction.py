"""One write to the ledger sees the data sets that it has locked, and what it adds to them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from dpray.accounting import ledger_queries as queries
from dpray.accounting.hash_chain import Chain, Entry
from dpray.accounting.ledger_account import Account, read_account
from dpray.accounting.ledger_schema import datasets, entries
from dpray.accounting.ledger_store import LedgerConflict, LedgerError, broken_chain


@dataclass(frozen=True)
class Tip:
    """Holds the end of a data set's chain as this process last saw it committed, and the account up
    to there, where it was read."""

    length: int
    head: str
    account: Account | None


@dataclass
class Seen:
    """Holds what a process has seen committed: the ends of chains, and the data sets that a name
    stands for, itself and its ancestors, which never change."""

    tips: dict[str, Tip] = field(default_factory=dict)
    lineages: dict[str, list[str]] = field(default_factory=dict)


class Transaction:
    """Holds the locked data sets of one transaction.

    A data set whose end is still the one that this process saw last is not read again: its account
    is the one in memory. If the end is another, its entries are read and checked, and the one seen
    last has to be among them: a ledger that was put back to an earlier state is refused, however
    whole it is in itself. Operations add their entries when nothing can refuse them any more, so
    that one that is refused leaves no trace in a transaction that it shares.
    """

    def __init__(self, connection: sa.Connection, seen: Seen) -> None:
        self.connection = connection
        self._seen = seen
        self._lineages: dict[str, list[str]] = {}
        self._rows: dict[str, sa.Row[Any]] = {}
        self._chains: dict[str, Chain] = {}
        self._accounts: dict[str, Account] = {}
        self._reservations: dict[str, Entry] = {}
        self._longer: set[str] = set()

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
        added = [vars(entry) for chain in chains for entry in chain.added]
        if added:
            self.connection.execute(sa.insert(entries), added)
        for chain in chains:
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

    def reservation(self, key: str) -> Entry:
        """Return the entry of a reservation. Raises `LedgerConflict` if there is none."""
        if key not in self._reservations:
            entry = queries.find(self.connection, "reserve", key)
            if entry is None:
                raise LedgerConflict(f"the ledger has no reservation '{key}'")
            self._reservations[key] = entry
        return self._reservations[key]

    def write_ends(self) -> None:
        """Write the new ends of all chains."""
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
