"""A data set's account is its terms and its charges, read back from the ledger's entries."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from dpray.accounting.composition import Charge, Composition, RenyiComposition, composition
from dpray.accounting.events import Event, event_from_json
from dpray.accounting.hash_chain import Entry
from dpray.accounting.ledger_queries import counted_entries
from dpray.accounting.ledger_store import broken_chain, datasets
from dpray.types import Budget, BudgetRefused, InputError

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
        charges = tuple(stated_charge(entry.payload) for entry in reservations)
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

    @property
    def overspent(self) -> bool:
        return bool(self.charges) and self.composition.would_exceed(
            self.charges[:-1], self.charges[-1]
        )

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
def stated_charge(payload: str) -> Charge:
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
