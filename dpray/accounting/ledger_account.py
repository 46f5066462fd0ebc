"""A data set's account: its terms and its charges, read back from the ledger's entries."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from dpray.accounting.accountant import cost
from dpray.accounting.composition import Charge, Composition, RenyiComposition, composition
from dpray.accounting.events import Event, event_from_json
from dpray.accounting.hash_chain import Entry
from dpray.accounting.ledger_store import broken_chain, entries
from dpray.types import Budget, BudgetRefused, InputError

RELATIVE_ROUNDING = 1e-9
"""Two machines may compute an event's cost with other last digits; more is a fault."""


@dataclass(frozen=True)
class Reservation:
    """A run's charge as it stands in the ledger; `seq` is its place in the data set's chain."""

    dataset: str
    key: str
    asked: Budget
    seq: int

    @classmethod
    def of(cls, entry: Entry) -> Reservation:
        values = entry.values()
        return cls(entry.dataset, entry.key, Budget(values["epsilon"], values["delta"]), entry.seq)


@dataclass(frozen=True)
class Account:
    """A data set's budget with the rule by which charges add up, what it is stated for, and the
    charges so far."""

    dataset: str
    composition: Composition
    privacy_unit: str
    neighboring_relation: str
    charges: tuple[Charge, ...] = ()

    @classmethod
    def new(
        cls,
        dataset: str,
        budget: Budget,
        privacy_unit: str,
        neighboring_relation: str,
        composition_name: str = "basic",
        order: float | None = None,
    ) -> Account:
        """An account without charges. Raises `InputError` for a bad budget, rule or order."""
        if composition_name != RenyiComposition.name and order is not None:
            raise InputError("an order belongs to a budget with the composition renyi")
        try:
            rule = composition(composition_name, budget, order)
        except ValueError as error:
            raise InputError(f"data set '{dataset}': {error}") from error
        return cls(dataset, rule, privacy_unit, neighboring_relation)

    @classmethod
    def replay(cls, rows: Iterable[Entry]) -> Account:
        """The account that one data set's create and reserve entries, in their order, add up to."""
        create, *reservations = rows
        terms = create.values()
        account = cls.new(
            create.dataset,
            Budget(**terms["budget"]),
            terms["privacy_unit"],
            terms["neighboring_relation"],
            terms["composition"],
            terms["order"],
        )
        charges = tuple(
            Charge(event_from_json(entry.values()["event"]), Reservation.of(entry).asked)
            for entry in reservations
        )
        return cls(**(vars(account) | {"charges": charges}))

    def terms(self) -> dict[str, Any]:
        """What the first entry of the data set holds."""
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

    def admit(self, charge: Charge, privacy_unit: str, neighboring_relation: str) -> None:
        """Return if the run fits. Raises `BudgetRefused`, and `InputError` for another privacy unit
        or relation."""
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


def read_account(connection: sa.Connection, dataset: str) -> Account | None:
    """The account of a data set, or None where it has none.

    Work grows with the number of runs, not of batches. Raises `LedgerError` where an entry that
    counts was altered.
    """
    rows = counted_entries(connection, dataset)
    if not rows:
        return None
    if rows[0].kind != "create" or any(entry.hash != entry.digest() for entry in rows):
        raise broken_chain(dataset)
    return Account.replay(rows)


def counted_entries(connection: sa.Connection, dataset: str) -> list[Entry]:
    """The create entry and the reserve entries of a data set, in their order."""
    # Asked for by kind alone, which an index answers: a data set may have a million other rows, and
    # a query by data set could be answered by walking over them.
    query = sa.select(entries).where(entries.c.kind.in_(["create", "reserve"]))
    rows = [Entry(**row._mapping) for row in connection.execute(query) if row.dataset == dataset]
    return sorted(rows, key=lambda entry: entry.seq)


def check_price(event: Event, asked: Budget) -> None:
    """Raises `InputError` for numbers that are no budget, and where a run asks for less than its
    event costs."""
    if not (math.isfinite(asked.epsilon) and asked.epsilon >= 0 and 0 <= asked.delta < 1):
        raise InputError(f"a charge has a finite epsilon and a delta below 1, not {asked}")
    price = cost(event, asked.delta).epsilon
    if not price <= asked.epsilon * (1 + RELATIVE_ROUNDING):
        raise InputError(
            f"a charge of {asked} does not cover its event, which costs epsilon {price:.6g}"
        )
