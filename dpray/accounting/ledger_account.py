"""A data set's account is its terms and its charges, read back from the ledger's entries.

`verify` and `show` read the ledger from end to end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any

import sqlalchemy as sa

from dpray.accounting.composition import Charge, Composition, RenyiComposition, composition
from dpray.accounting.events import Event, event_from_json
from dpray.accounting.hash_chain import Chain, Entry
from dpray.accounting.ledger_queries import (
    all_entries,
    count,
    counted_entries,
    dataset_names,
    find,
)
from dpray.accounting.ledger_store import broken_chain, datasets
from dpray.types import Budget, BudgetRefused, DprayError, InputError

RELATIVE_ROUNDING = 1e-9
"""An event's cost may differ by this much between two machines; a larger difference is a fault."""


@dataclass(frozen=True)
class Account:
    """Holds a data set's budget with the rule by which charges add up, what it is stated for, and
    the charges so far."""

    dataset: str
    composition: Composition
    privacy_unit: str
    neighboring_relation: str
    charges: tuple[Charge, ...] = ()

    @classmethod
    def replay(cls, rows: Iterable[Entry]) -> Account:
        """Return the account that one data set's create and reserve entries, in their order, add up
        to."""
        create, *reservations = rows
        terms = create.values()
        rule = composition(terms["composition"], Budget(**terms["budget"]), terms["order"])
        charges = tuple(_charge(entry.payload) for entry in reservations)
        stated_for = terms["privacy_unit"], terms["neighboring_relation"]
        return cls(create.dataset, rule, *stated_for, charges)

    def terms(self) -> dict[str, Any]:
        """Return what the first entry of the data set holds."""
        rule = self.composition
        return {
            "budget": vars(rule.budget),
            "privacy_unit": self.privacy_unit,
            "neighboring_relation": self.neighboring_relation,
            "composition": rule.name,
            "order": rule.order if isinstance(rule, RenyiComposition) else None,
        }

    @property
    def budget(self) -> Budget:
        return self.composition.budget

    @property
    def spent(self) -> Budget:
        return self.composition.spent(self.charges)

    @property
    def left(self) -> Budget:
        return self.composition.left(self.charges)

    def admit(self, charge: Charge, privacy_unit: str, neighboring_relation: str) -> Account:
        """Return the account with this charge. Raises `BudgetRefused` if it does not fit, and
        `InputError` for another privacy unit or relation."""
        ours = (self.privacy_unit, self.neighboring_relation)
        if (privacy_unit, neighboring_relation) != ours:
            raise InputError(
                f"the budget of '{self.dataset}' is for the privacy unit '{ours[0]}' and the "
                f"relation '{ours[1]}', the run is for '{privacy_unit}' and "
                f"'{neighboring_relation}': these do not compose"
            )
        if self.composition.would_exceed(self.charges, charge):
            detail = ""
            if isinstance(self.composition, RenyiComposition):
                weight = self.composition.spent([charge])
                detail = f"by renyi at order {self.composition.order:g} it weighs {weight}"
            raise BudgetRefused(self.dataset, charge.reserved, self.spent, self.left, detail)
        return replace(self, charges=(*self.charges, charge))


@lru_cache(maxsize=20_000)
def _charge(payload: str) -> Charge:
    """Return the charge that a reservation's payload states. It is kept, because every admission
    reads all charges of its data set."""
    values = json.loads(payload)
    return Charge(event_from_json(values["event"]), Budget(values["epsilon"], values["delta"]))


def read_account(connection: sa.Connection, dataset: str) -> Account | None:
    """Return the account of a data set, by its name in the ledger; None if it has no account.

    Work grows with the number of its runs, not of batches, nor of other data sets. Raises
    `LedgerError` if an entry that counts was altered or is missing.
    """
    rows = counted_entries(connection, dataset)
    query = sa.select(datasets.c.reservations).where(datasets.c.name == dataset)
    reservations = connection.execute(query).scalar()
    if not rows and reservations is None:
        return None
    if (
        reservations != len(rows) - 1
        or rows[0].kind != "create"
        or any(entry.hash != entry.digest() for entry in rows)
    ):
        raise broken_chain(dataset)
    return Account.replay(rows)


def committed(connection: sa.Connection, dataset: str) -> Budget:
    """Return what the charges of the finished runs of a data set add up to. A run's later charges
    have its key before a slash."""
    create, *reservations = counted_entries(connection, dataset)
    finished = [
        entry for entry in reservations if find(connection, "commit", entry.key.split("/")[0])
    ]
    return Account.replay([create, *finished]).spent


def check_price(event: Event, asked: Budget) -> None:
    """Raise `InputError` for numbers that are no budget, and for a run that asks for less than its
    event costs."""
    # Late: a ledger is read without the accountant and what it imports.
    from dpray.accounting.accountant import cost

    if not (math.isfinite(asked.epsilon) and asked.epsilon >= 0 and 0 <= asked.delta < 1):
        raise InputError(f"a charge has a finite epsilon and a delta below 1, not {asked}")
    price = cost(event, asked.delta).epsilon
    if not price <= asked.epsilon * (1 + RELATIVE_ROUNDING):
        raise InputError(
            f"a charge of {asked} does not cover its event, which costs epsilon {price:.6g}"
        )


def problems(connection: sa.Connection) -> Iterator[str]:
    """Return what `Ledger.verify` does."""
    ends = {row["name"]: row for row in connection.execute(sa.select(datasets)).mappings()}
    for name, rows in groupby(all_entries(connection), key=lambda entry: entry.dataset):
        end = ends.pop(name, None)
        chain = Chain(name)
        yield from _dataset_problems(chain, rows)
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


def summaries(connection: sa.Connection) -> list[dict[str, Any]]:
    """Return for each data set `dataset`, `budget`, `privacy_unit`, `neighboring_relation`,
    `composition`, `order`, `spent`, `left`, and `entries`: one for each reservation, with what it
    asked for and how many of its batches were started, published and failed."""
    return [_summary(connection, name) for name in dataset_names(connection)]


def _summary(connection: sa.Connection, name: str) -> dict[str, Any]:
    account = read_account(connection, name)
    if account is None:
        return {"dataset": name, "entries": []}
    return {
        "dataset": name,
        **account.terms(),
        "spent": vars(account.spent),
        "left": vars(account.left),
        "entries": [
            {
                "key": entry.key,
                "at": entry.at,
                **vars(_charge(entry.payload).reserved),
                "event": entry.values()["event"],
                "batches": count(connection, entry.key),
            }
            for entry in counted_entries(connection, name)[1:]
        ],
    }


def _dataset_problems(chain: Chain, rows: Iterator[Entry]) -> Iterator[str]:
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
            open_runs.add(entry.key)
        elif entry.kind == "commit":
            open_runs.discard(entry.key)
    yield from _account_problems(chain.dataset, counted)


def _account_problems(dataset: str, counted: list[Entry]) -> Iterator[str]:
    try:
        account = Account.replay(counted)
    except (DprayError, ValueError, KeyError, TypeError) as error:
        yield f"data set '{dataset}': its charges cannot be read ({type(error).__name__})"
        return
    for entry in counted[1:]:
        where = f"data set '{dataset}', reservation '{entry.key}'"
        values = entry.values()
        for term in ("privacy_unit", "neighboring_relation"):
            if values.get(term) != getattr(account, term):
                yield f"{where}: its {term} is not the budget's"
        try:
            charge = _charge(entry.payload)
            check_price(charge.event, charge.reserved)
        except (DprayError, ValueError) as error:
            yield f"{where}: {error}"
    charges = account.charges
    if charges and account.composition.would_exceed(charges[:-1], charges[-1]):
        yield f"data set '{dataset}': spent {account.spent} of {account.budget}"
