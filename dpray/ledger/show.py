"""`verify` and `show` read the ledger from end to end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import sqlalchemy as sa

from dpray.ledger.account import Account, charge_of, check_price
from dpray.ledger.chain import Chain, Entry
from dpray.ledger.store import datasets, entries
from dpray.ledger.transaction import (
    all_entries,
    counted_entries,
    dataset_names,
    find,
    read_account,
)
from dpray.types import DprayError, InputError


def problems(connection: sa.Connection) -> Iterator[str]:
    """Return what `Ledger.verify` does."""
    ends = {row["name"]: row for row in connection.execute(sa.select(datasets)).mappings()}
    family = _Family()
    for name, rows in groupby(all_entries(connection), key=lambda entry: entry.dataset):
        end = ends.pop(name, None)
        chain = Chain(name)
        yield from _dataset_problems(chain, rows, family)
        if end is None:
            yield f"data set '{name}': its own row is missing"
        elif end != chain.end | {"name": name}:
            yield (
                f"data set '{name}': its chain has {chain.length} entries of {end['length']}, "
                f"{chain.reservations} reservations and tenants of {end['reservations']}, or ends "
                "in another entry than was written"
            )
    for name in ends:
        yield f"data set '{name}': all of its entries are missing"
    yield from family.problems()


@dataclass
class _Family:
    """The ties between the chains: the data sets' accounts, the reservations that were made on a
    data set (by key), and the payloads of those that were drawn on it for a child (by data set and
    key)."""

    accounts: dict[str, Account] = field(default_factory=dict)
    made: dict[str, Entry] = field(default_factory=dict)
    drawn: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, reservation: Entry) -> None:
        if reservation.unit:
            self.drawn[reservation.dataset, reservation.key] = reservation.payload
        else:
            self.made[reservation.key] = reservation

    def problems(self) -> Iterator[str]:
        for name, account in self.accounts.items():
            yield from self._parent_problems(name, account)
        for key, entry in self.made.items():
            for ancestor in self._ancestors(entry.dataset):
                if self.drawn.pop((ancestor, key), None) != entry.payload:
                    yield (
                        f"data set '{ancestor}': the reservation '{key}' on its child "
                        f"'{entry.dataset}' was not drawn on it"
                    )
        for name, key in self.drawn:
            yield f"data set '{name}': '{key}' was drawn on it, but reserved on no child of it"

    def _parent_problems(self, name: str, account: Account) -> Iterator[str]:
        if account.parent is None:
            return
        if (parent := self.accounts.get(account.parent)) is None:
            yield f"data set '{name}': its parent '{account.parent}' is missing"
            return
        try:
            account.below(parent)
        except InputError as error:
            yield str(error)
        if name in self._ancestors(name):
            yield f"data set '{name}': it is its own ancestor"

    def _ancestors(self, name: str) -> list[str]:
        found: list[str] = []
        account = self.accounts.get(name)
        while account is not None and account.parent is not None and account.parent not in found:
            found.append(account.parent)
            account = self.accounts.get(account.parent)
        return found


def _dataset_problems(chain: Chain, rows: Iterator[Entry], family: _Family) -> Iterator[str]:
    """Walk one chain; memory grows with the runs, not with their batches."""
    counted: list[Entry] = []
    open_runs: set[str] = set()
    for entry in rows:
        yield from chain.faults(entry)
        if entry.kind in ("create", "reserve"):
            counted.append(entry)
        elif entry.kind != "data" and entry.key not in open_runs:
            yield (
                f"data set '{chain.dataset}', entry {entry.seq}: '{entry.kind}' without an open "
                "reservation"
            )
        if entry.kind == "reserve":
            family.add(entry)
            if not entry.unit:
                open_runs.add(entry.key)
        elif entry.kind == "commit":
            open_runs.discard(entry.key)
    yield from _account_problems(chain.dataset, counted, family)


def _account_problems(dataset: str, counted: list[Entry], family: _Family) -> Iterator[str]:
    try:
        account = Account.replay(counted)
    except (DprayError, ValueError, KeyError, TypeError) as error:
        yield f"data set '{dataset}': its charges cannot be read ({type(error).__name__})"
        return
    family.accounts[dataset] = account
    for entry in counted:
        if entry.kind == "reserve":
            yield from _reservation_problems(account, entry)
    shares = {f" for the tenant '{name}'": account.share(name) for name in account.tenants}
    for whose, share in {"": account, **shares}.items():
        if share.composition.is_exceeded(share.total):
            yield f"data set '{dataset}': spent {share.spent} of {share.budget}{whose}"


def _reservation_problems(account: Account, entry: Entry) -> Iterator[str]:
    where = f"data set '{account.dataset}', reservation '{entry.key}'"
    values = entry.values()
    for term in ("privacy_unit", "neighboring_relation"):
        if values.get(term) != getattr(account, term):
            yield f"{where}: its {term} is not the budget's"
    try:
        charge = charge_of(entry.payload)
        check_price(charge.event, charge.reserved)
    except (DprayError, ValueError) as error:
        yield f"{where}: {error}"


def count(connection: sa.Connection, key: str) -> dict[str, int]:
    """Return what `RunLedger.counts` returns."""

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


def summaries(connection: sa.Connection) -> list[dict[str, Any]]:
    """Return for each data set `dataset`, `budget`, `privacy_unit`, `neighboring_relation`,
    `composition`, `order`, `parent`, `spent`, `left`, `tenants`, a list of `tenant`, `budget`,
    `spent`, `left`, and `entries`: one for each reservation, with its `tenant`, the child that it
    was `drawn_by`, what it asked for, the epsilon `spent` after it, and how many of its batches
    were started, published and failed."""
    return [_summary(connection, name) for name in dataset_names(connection)]


def _summary(connection: sa.Connection, name: str) -> dict[str, Any]:
    account = read_account(connection, name)
    shares = {tenant: account.share(tenant) for tenant in account.tenants}
    runs = [entry for entry in counted_entries(connection, name) if entry.kind == "reserve"]
    return {
        "dataset": name,
        "parent": None,
        **account.terms(),
        **_balance(account),
        "tenants": [{"tenant": tenant, **_balance(shares[tenant])} for tenant in sorted(shares)],
        "entries": [
            _run(connection, entry) | {"spent": spent.epsilon}
            for entry, spent in zip(runs, account.history(), strict=True)
        ],
    }


def _balance(account: Account) -> dict[str, Any]:
    budgets = {"budget": account.budget, "spent": account.spent, "left": account.left}
    return {name: vars(value) for name, value in budgets.items()}


def _run(connection: sa.Connection, entry: Entry) -> dict[str, Any]:
    charge = charge_of(entry.payload)
    made = find(connection, "reserve", entry.key) if entry.unit else None
    return {
        "key": entry.key,
        "at": entry.at,
        **vars(charge.reserved),
        "tenant": charge.tenant,
        "drawn_by": None if made is None else made.dataset,
        "event": entry.values()["event"],
        "batches": count(connection, entry.key),
    }
