"""A data set's account: its budget and its charges, read back from the ledger's entries.

An account is made of the data set's `create` entry and its `reserve` and `raise` entries.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from dpray.accounting.accountant import cost
from dpray.accounting.composed_events import event_from_json
from dpray.accounting.composition import Charge, Composition, RenyiComposition, Total, composition
from dpray.accounting.event import Event
from dpray.ledger.chain import Entry, check_name, check_public
from dpray.types import Budget, BudgetRefused, InputError, LedgerError

RELATIVE_ROUNDING = 1e-9
"""An event's cost may differ by this much between two machines; a larger difference is a fault."""

RELATIVE_CHANGE = 0.02
"""An event may have cost this much less by another version of the accountant: dpray 0.1 left no
room for some rounding, and composed more than 256 draws in one pass (docs/privacy.md, section
6.7)."""


@dataclass(frozen=True)
class Account:
    """A data set's budget and the charges made against it.

    `composition` is the present budget with the rule by which charges add up to `total`. `raises`
    are the entries by which the budget became larger.
    """

    dataset: str
    composition: Composition
    privacy_unit: str
    neighboring_relation: str
    charges: tuple[Charge, ...] = ()
    total: Total = ()
    raises: tuple[Entry, ...] = ()

    @classmethod
    def replay(cls, rows: Iterable[Entry]) -> Account:
        """Return the account that one data set's create, reserve and raise entries add up to."""
        create, *later = rows
        terms = create.values()
        if terms.get("parent") is not None:  # dpray 0.1 drew its charges on the parent too
            raise LedgerError(
                f"data set '{create.dataset}' is a child of '{terms['parent']}', and this version "
                "of dpray knows no children: charge its runs to the parent"
            )
        rule = composition(terms["composition"], Budget(**terms["budget"]), terms["order"])
        charges = tuple(charge_of(entry.payload) for entry in later if entry.kind == "reserve")
        raises = tuple(entry for entry in later if entry.kind == "raise")
        if raises:
            rule = replace(rule, budget=raised_to(raises[-1]))
        stated_for = terms["privacy_unit"], terms["neighboring_relation"]
        total = rule.total(charges)
        return cls(create.dataset, rule, *stated_for, charges, total, raises)

    def terms(self) -> dict[str, object]:
        """Return the content of the data set's first entry."""
        rule = self.composition
        return {
            "budget": vars(rule.budget),
            "order": rule.order if isinstance(rule, RenyiComposition) else None,
            "privacy_unit": self.privacy_unit,
            "neighboring_relation": self.neighboring_relation,
            "composition": rule.name,
        }

    @property
    def budget(self) -> Budget:
        return self.composition.budget

    @property
    def spent(self) -> Budget:
        return self.composition.spent(self.total)

    @property
    def left(self) -> Budget:
        return self.composition.left(self.total)

    def history(self) -> Iterator[Budget]:
        """Yield what was spent after each charge."""
        rule = self.composition
        totals = accumulate(self.charges, rule.add, initial=rule.total(()))
        next(totals)  # before the first charge
        return map(rule.spent, totals)

    def check_raise(self, budget: Budget) -> None:
        """Raise `InputError` unless `budget` is larger than the present one.

        Claim: for every budget B, what is released before the data set's budget exceeds B is
        B-DP: until then the rule is a filter for B. Only the budget changes, never the rule nor its
        order, and a raise forgets no charge.
        Proof: docs/privacy.md, section 6.4.
        """
        try:
            replace(self.composition, budget=budget)
        except ValueError as error:
            raise InputError(f"data set '{self.dataset}': {error}") from error
        now = self.budget
        if budget == now or budget.epsilon < now.epsilon or budget.delta < now.delta:
            raise InputError(
                f"the budget of '{self.dataset}' is {now}, and is only raised: what was released "
                f"under it has no stronger guarantee; asked {budget}"
            )

    def admit(self, charge: Charge, privacy_unit: str, neighboring_relation: str) -> Account:
        """Return the account with this charge. Raises `BudgetRefused` if it does not fit the
        budget, and `InputError` for another privacy unit or relation."""
        stated_for = (self.privacy_unit, self.neighboring_relation)
        if (privacy_unit, neighboring_relation) != stated_for:
            raise InputError(
                f"the budget of '{self.dataset}' is for the privacy unit '{stated_for[0]}' and "
                f"the relation '{stated_for[1]}', the run is for '{privacy_unit}' and "
                f"'{neighboring_relation}': these do not compose; set data.unit as it was, or give "
                "records that no run has read a privacy.dataset of their own"
            )
        rule = self.composition
        total = rule.add(self.total, charge)
        if rule.is_exceeded(total):
            detail = ""
            if isinstance(rule, RenyiComposition):
                weight = rule.spent(rule.total([charge]))
                detail = f"by renyi at order {rule.order:g} it weighs {weight}"
            known = (charge.reserved, self.spent, self.left)
            raise BudgetRefused(self.dataset, *known, detail, rule.needed(total))
        return replace(self, charges=(*self.charges, charge), total=total)


def new_account(
    name: str,
    budget: Budget,
    privacy_unit: str,
    neighboring_relation: str,
    rule: str = "basic",
    order: float | None = None,
) -> Account:
    """Return the account of a new data set. Raises `InputError` for one that cannot be."""
    if rule != RenyiComposition.name and order is not None:
        raise InputError("an order belongs to a budget with the composition renyi")
    try:
        composed = composition(rule, budget, order)
    except ValueError as error:
        raise InputError(f"data set '{name}': {error}") from error
    check_public("the name of a privacy unit", [privacy_unit])
    stated_for = privacy_unit, neighboring_relation
    return Account(check_name(name), composed, *stated_for, total=composed.total(()))


def raised_to(entry: Entry) -> Budget:
    """Return the budget that a raise states."""
    return Budget(**entry.values()["budget"])


@lru_cache(maxsize=20_000)
def charge_of(payload: str) -> Charge:
    """Return the charge that a reservation's payload states. It is cached, because every process
    that opens a data set reads all of its charges."""
    values = json.loads(payload)
    return Charge(event_from_json(values["event"]), Budget(values["epsilon"], values["delta"]))


_PRICING = threading.Lock()
"""One thread at a time computes a price; the others find it in the cache."""


def check_price(event: Event, asked: Budget, tolerance: float = RELATIVE_ROUNDING) -> None:
    """Raise `InputError` for numbers that are no budget, and for a run that asks for less than its
    event costs, up to a relative `tolerance`."""
    if not (math.isfinite(asked.epsilon) and asked.epsilon >= 0 and 0 <= asked.delta < 1):
        raise InputError(f"a charge has a finite epsilon and a delta below 1, not {asked}")
    with _PRICING:
        price = cost(event, asked.delta).epsilon
    if not price <= asked.epsilon * (1 + tolerance):
        raise InputError(
            f"a charge of {asked} does not cover its event, which costs epsilon {price:.6g}"
        )
