"""The ledger is checked before a run is charged, while its data is still closed."""

from __future__ import annotations

from dpray.accounting.composition import Charge
from dpray.accounting.events import NEIGHBORING_RELATION
from dpray.accounting.ledger import Ledger
from dpray.accounting.ledger_account import Account
from dpray.runs.plan import Plan
from dpray.types import Budget, InputError


def account_to_charge(ledger: Ledger, plan: Plan, made_by_this_run: bool) -> Account:
    """Return the account of the plan's data set. A ledger that this run made gets one with just the
    plan's cost. In any other, raises InputError: an unknown name is more likely mistyped than new.
    """
    name = plan.config.privacy.dataset
    if (account := ledger.account(name)) is not None:
        return account
    names = ledger.names()
    # A run that was cut off between making the file and the data set left the ledger empty.
    if names or not made_by_this_run:
        raise InputError(
            f"privacy.dataset: the ledger has no data set {name!r}; it has "
            f"{', '.join(map(repr, names)) or 'none'} (`dpray ledger create` makes one)"
        )
    ledger.create_dataset(name, _whole(plan), plan.privacy_unit, NEIGHBORING_RELATION)
    account = ledger.account(name)
    assert account is not None
    return account


def check_budget(account: Account, plan: Plan) -> None:
    """Check that the budget holds the whole plan: a plan with several charges is refused as a
    whole, not at the charge that does not fit. Raises BudgetRefused, and InputError for another
    privacy unit or relation; charges nothing."""
    account.admit(Charge(plan.dp_event, _whole(plan)), plan.privacy_unit, NEIGHBORING_RELATION)


def _whole(plan: Plan) -> Budget:
    return Budget(plan.cost.epsilon, plan.cost.delta)
