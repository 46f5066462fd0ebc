"""`verify` and `show` read the ledger from end to end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import sqlalchemy as sa

from dpray.ledger import queries
from dpray.ledger.account import Account, charge_of, check_price
from dpray.ledger.chain import Chain, Entry
from dpray.types import DprayError, InputError


def problems(connection: sa.Connection) -> Iterator[str]:
    """Yield the problems that `Ledger.verify` returns."""
    ends = {row["name"]: row for row in connection.execute(sa.select(queries.datasets)).mappings()}
    family = _Family()
    for name, rows in groupby(queries.all_entries(connection), key=lambda entry: entry.dataset):
        end = ends.pop(name, None)
        chain = Chain(name)
        yield from _dataset_problems(chain, rows, family)
        if end is None:
            yield f"data set '{name}': its own row is missing"
        elif end != chain.end | {"name": name}:
            yield (
                f"data set '{name}': its chain has {chain.length} entries of {end['length']}, "
                f"{chain.reservations} reservations of {end['reservations']}, or ends in another "
                "entry than was written"
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

    def problems(self) -> Iterator[str]:
        for account in self.accounts.values():
            yield from self._parent_problems(account)
        for key, entry in self.made.items():
            for ancestor in self._ancestors(entry.dataset):
                if self.drawn.pop((ancestor, key), None) != entry.payload:
                    yield (
                        f"data set '{ancestor}': the reservation '{key}' on its child "
                        f"'{entry.dataset}' was not drawn on it"
                    )
        for name, key in self.drawn:
            yield f"data set '{name}': '{key}' was drawn on it, but reserved on no child of it"

    def _parent_problems(self, account: Account) -> Iterator[str]:
        if account.parent is None:
            return
        if (parent := self.accounts.get(account.parent)) is None:
            yield f"data set '{account.dataset}': its parent '{account.parent}' is missing"
            return
        try:
            account.below(parent)
        except InputError as error:
            yield str(error)
        if account.dataset in self._ancestors(account.dataset):
            yield f"data set '{account.dataset}': it is its own ancestor"

    def _ancestors(self, name: str) -> list[str]:
        found: list[str] = []
        while (account := self.accounts.get(name)) is not None:
            if account.parent is None or account.parent in found:
                break
            found.append(name := account.parent)
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
        if entry.kind == "reserve" and entry.unit:
            family.drawn[entry.dataset, entry.key] = entry.payload
        elif entry.kind == "reserve":
            family.made[entry.key] = entry
            open_runs.add(entry.key)
        elif entry.kind == "commit":
            open_runs.discard(entry.key)
    try:
        account = Account.replay(counted)
    except (DprayError, ValueError, KeyError, TypeError) as error:
        yield f"data set '{chain.dataset}': its charges cannot be read ({type(error).__name__})"
        return
    family.accounts[chain.dataset] = account
    for entry in counted[1:]:
        yield from _reservation_problems(account, entry)
    if account.composition.is_exceeded(account.total):
        yield f"data set '{chain.dataset}': spent {account.spent} of {account.budget}"


def _reservation_problems(account: Account, entry: Entry) -> Iterator[str]:
    place = f"data set '{account.dataset}', reservation '{entry.key}'"
    values = entry.values()
    for term in ("privacy_unit", "neighboring_relation"):
        if values.get(term) != getattr(account, term):
            yield f"{place}: its {term} is not the budget's"
    try:
        charge = charge_of(entry.payload)
        check_price(charge.event, charge.reserved)
    except (DprayError, ValueError) as error:
        yield f"{place}: {error}"


def summaries(connection: sa.Connection) -> list[dict[str, Any]]:
    """Return for each data set `dataset`, `budget`, `privacy_unit`, `neighboring_relation`,
    `composition`, `order`, `parent`, `spent`, `left` and `entries`: one for each reservation, with
    the child that it was `drawn_by`, the (epsilon, delta) asked for, the epsilon `spent` after it,
    and the numbers of its batches that were started, published and failed."""
    return [_summary(connection, name) for name in queries.dataset_names(connection)]


def _summary(connection: sa.Connection, name: str) -> dict[str, Any]:
    account = queries.read_account(connection, name)
    _, *runs = queries.counted_entries(connection, name)
    return {
        "dataset": name,
        **account.terms(),
        "spent": vars(account.spent),
        "left": vars(account.left),
        "entries": [
            _run(connection, entry) | {"spent": spent.epsilon}
            for entry, spent in zip(runs, account.history(), strict=True)
        ],
    }


def _run(connection: sa.Connection, entry: Entry) -> dict[str, Any]:
    made = queries.find(connection, "reserve", entry.key) if entry.unit else None
    return {
        "key": entry.key,
        "at": entry.at,
        **vars(charge_of(entry.payload).reserved),
        "drawn_by": None if made is None else made.dataset,
        "event": entry.values()["event"],
        "batches": queries.count(connection, entry.key),
    }
