"""A data set's account is its terms and its charges, read back from the ledger's entries.

An account is made of the data set's `create` entry, of one more `create` entry for each tenant, and
of its `reserve` entries: the runs on the data set itself and those on its children, whose charges
are drawn on it too. One chain has them all, so that no other chain is needed to know what is left.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, islice
from typing import Any

from dpray.accounting.composed_events import event_from_json
from dpray.accounting.composition import (
    Charge,
    Composition,
    RenyiComposition,
    Total,
    composition,
)
from dpray.accounting.event import Event
from dpray.ledger.chain import Entry, folded
from dpray.types import Budget, BudgetRefused, InputError

RELATIVE_ROUNDING = 1e-9
"""An event's cost may differ by this much between two machines; a larger difference is a fault."""


@dataclass(frozen=True)
class Account:
    """A data set's budget and the charges made against it.

    `composition` is the budget with the rule by which charges add up; `total` is what the charges
    add up to. `tenants` has, by name, an account of each tenant's cap and of its own charges.
    """

    dataset: str
    composition: Composition
    privacy_unit: str
    neighboring_relation: str
    parent: str | None = None
    tenants: Mapping[str, Account] = field(default_factory=dict)
    charges: tuple[Charge, ...] = ()
    total: Total = ()

    def __post_init__(self) -> None:
        if not self.total:
            object.__setattr__(self, "total", self.composition.total(self.charges))

    @classmethod
    def replay(cls, rows: Iterable[Entry]) -> Account:
        """Return the account that one data set's create and reserve entries, in their order, add up
        to."""
        create, *later = rows
        terms = create.values()
        rule = composition(terms["composition"], Budget(**terms["budget"]), terms["order"])
        charges = tuple(charge_of(entry.payload) for entry in later if entry.kind == "reserve")
        stated_for = terms["privacy_unit"], terms["neighboring_relation"]
        whole = cls(create.dataset, rule, *stated_for, terms.get("parent"), {}, charges)
        for entry in later:
            if entry.kind == "create":
                whole = whole.with_tenant(entry)
        return whole

    def terms(self) -> dict[str, Any]:
        """Return what the first entry of the data set holds."""
        terms = {
            **_limit(self.composition),
            "privacy_unit": self.privacy_unit,
            "neighboring_relation": self.neighboring_relation,
            "composition": self.composition.name,
        }
        return terms if self.parent is None else terms | {"parent": self.parent}

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
        totals = accumulate(self.charges, self.composition.add, initial=self.composition.total(()))
        return map(self.composition.spent, islice(totals, 1, None))

    def below(self, parent: Account | None) -> Account:
        """Return the account as the child of another. Raises `InputError` if its charges would
        not compose with the parent's."""
        if parent is None:
            return self
        for term in ("privacy_unit", "neighboring_relation"):
            if getattr(self, term) != getattr(parent, term):
                raise InputError(
                    f"data set '{self.dataset}' is for '{getattr(self, term)}', its parent "
                    f"'{parent.dataset}' for '{getattr(parent, term)}': these do not compose"
                )
        return replace(self, parent=parent.dataset)

    def with_tenant(self, entry: Entry) -> Account:
        """Return the account with the tenant that this entry gives a cap."""
        terms = entry.values()
        rule = composition(self.composition.name, Budget(**terms["budget"]), terms["order"])
        own = tuple(charge for charge in self.charges if charge.tenant == entry.unit)
        share = replace(self, composition=rule, tenants={}, charges=own, total=())
        return replace(self, tenants={**self.tenants, entry.unit: share})

    def cap(self, tenant: str, budget: Budget) -> dict[str, Any]:
        """Return what the entry of a new tenant holds. The order of a renyi cap is its own: at that
        of a large budget, a small one may hold nothing.

        Raises `InputError` for a cap beyond the data set's budget, or another tenant's name in
        other letters.
        """
        if any(folded(tenant) == folded(other) for other in self.tenants):
            raise InputError(f"'{self.dataset}' has the tenant '{tenant}' in another spelling")
        if not (budget.epsilon <= self.budget.epsilon and budget.delta <= self.budget.delta):
            raise InputError(
                f"tenant '{tenant}': {budget} is more than the budget of '{self.dataset}', "
                f"{self.budget}"
            )
        try:
            return _limit(composition(self.composition.name, budget))
        except ValueError as error:
            raise InputError(f"tenant '{tenant}': {error}") from error

    def share(self, tenant: str | None) -> Account:
        """Return what one tenant has of this account: its cap, and its own charges. Raises
        `InputError` for a tenant that has none."""
        if tenant is None or tenant not in self.tenants:
            named = "it has none" if tenant is None else f"'{tenant}' is not one of them"
            raise InputError(
                f"privacy.tenant: a run on '{self.dataset}' has to name one of its tenants "
                f"({', '.join(self.tenants)}), and {named}"
            )
        return self.tenants[tenant]

    def _with(self, charge: Charge, details: list[str]) -> Account:
        rule = self.composition
        total = rule.add(self.total, charge)
        if rule.is_exceeded(total):
            if isinstance(rule, RenyiComposition):
                weight = rule.spent(rule.total([charge]))
                details = [*details, f"by renyi at order {rule.order:g} it weighs {weight}"]
            known = (charge.reserved, self.spent, self.left)
            raise BudgetRefused(self.dataset, *known, "; ".join(details))
        return replace(self, charges=(*self.charges, charge), total=total)


def _limit(rule: Composition) -> dict[str, Any]:
    order = rule.order if isinstance(rule, RenyiComposition) else None
    return {"budget": vars(rule.budget), "order": order}


def admit(
    accounts: Sequence[Account], charge: Charge, privacy_unit: str, neighboring_relation: str
) -> list[Account]:
    """Return the accounts of a data set and of its ancestors, itself first, with this charge.

    Raises `BudgetRefused` if it does not fit one of the budgets or its tenant's cap, and
    `InputError` for another privacy unit or relation, or a tenant that has no part of the budget.
    """
    own = accounts[0].dataset
    if charge.tenant is not None and not any(account.tenants for account in accounts):
        raise InputError(
            f"privacy.tenant: '{own}' has no tenants (`dpray ledger create --tenant` makes one)"
        )
    admitted = []
    for account in accounts:
        ours = (account.privacy_unit, account.neighboring_relation)
        if (privacy_unit, neighboring_relation) != ours:
            raise InputError(
                f"the budget of '{account.dataset}' is for the privacy unit '{ours[0]}' and the "
                f"relation '{ours[1]}', the run is for '{privacy_unit}' and "
                f"'{neighboring_relation}': these do not compose"
            )
        details = [] if account is accounts[0] else [f"'{own}' draws on it"]
        tenants = account.tenants
        if tenants:
            of_tenant = f"this is what the tenant '{charge.tenant}' has of it"
            share = account.share(charge.tenant)._with(charge, [*details, of_tenant])
            tenants = {**tenants, charge.tenant or "": share}
        admitted.append(replace(account._with(charge, details), tenants=tenants))
    return admitted


@lru_cache(maxsize=20_000)
def charge_of(payload: str) -> Charge:
    """Return the charge that a reservation's payload states. It is cached: every process that
    opens a data set reads all of its charges."""
    values = json.loads(payload)
    reserved = Budget(values["epsilon"], values["delta"])
    return Charge(event_from_json(values["event"]), reserved, values.get("tenant"))


_PRICING = threading.Lock()
"""One thread at a time computes a price: of hundreds that ask for the same one, the others find it
in the cache."""


def check_price(event: Event, asked: Budget) -> None:
    """Raise `InputError` for numbers that are no budget, and for a run that asks for less than its
    event costs."""
    # Late: a ledger is read without the accountant and what it imports.
    from dpray.accounting.accountant import cost

    if not (math.isfinite(asked.epsilon) and asked.epsilon >= 0 and 0 <= asked.delta < 1):
        raise InputError(f"a charge has a finite epsilon and a delta below 1, not {asked}")
    with _PRICING:
        price = cost(event, asked.delta).epsilon
    if not price <= asked.epsilon * (1 + RELATIVE_ROUNDING):
        raise InputError(
            f"a charge of {asked} does not cover its event, which costs epsilon {price:.6g}"
        )
