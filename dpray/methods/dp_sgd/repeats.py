"""What steps that are made again cost.

A training that was cut off goes on from its last checkpoint. The steps after it may have been made
and seen (their noise has been drawn), so they count, and so do those that are made in their place:
T planned steps and R repeated ones are T + R steps of one mechanism, and when a machine is lost
does not depend on the data. `method.spare_steps` of them are in the run's first charge; each one
beyond is a charge of its own, made before the step is.

The report states the cost of all steps that were charged, as one composition. A ledger whose budget
composes by `basic` adds the charges' epsilons and deltas up instead, which is more.
"""

from __future__ import annotations

from dataclasses import replace

from dpray.accounting.accountant import cost
from dpray.accounting.events import NEIGHBORING_RELATION, SelfComposed
from dpray.accounting.run_ledger import RunLedger
from dpray.methods.dp_sgd.plan import DpSgdPlan
from dpray.types import Budget, BudgetRefused


def beyond_spare(lost: list[int], spare: int) -> list[int]:
    """How many steps of every lost block the spare ones do not pay for."""
    unpaid = []
    for steps in lost:
        paid = min(spare, steps)
        spare -= paid
        unpaid.append(steps - paid)
    return unpaid


def with_repeats(plan: DpSgdPlan, lost: list[int]) -> DpSgdPlan:
    """The plan as it is charged once the lost blocks are made again."""
    spare = plan.method.repeats
    repeats = spare + sum(beyond_spare(lost, spare))
    return replace(plan, method=replace(plan.method, repeats=repeats))


def charge_again(ledger: RunLedger, key: str, plan: DpSgdPlan, lost: list[int]) -> None:
    """Reserve what the lost blocks cost beyond the spare steps; idempotent. Raises BudgetRefused
    where that is more than `privacy.epsilon` or the budget allows."""
    privacy = plan.config.privacy
    why = (
        f"{sum(lost)} of {plan.method.steps} steps were cut off and would be made again; "
        f"method.spare_steps pays for such steps beforehand"
    )
    whole = with_repeats(plan, lost).cost
    if whole.epsilon > privacy.epsilon:
        raise BudgetRefused(
            privacy.dataset,
            Budget(whole.epsilon, whole.delta),
            Budget(plan.cost.epsilon, plan.cost.delta),
            Budget(privacy.epsilon - plan.cost.epsilon, 0.0),
            f"privacy.epsilon is {privacy.epsilon:g}: {why}",
        )
    for number, steps in enumerate(beyond_spare(lost, plan.method.repeats), start=1):
        if steps == 0:
            continue
        event = SelfComposed(plan.method.mechanism.dp_event, steps)
        price = cost(event, privacy.delta)
        asked = Budget(price.epsilon, price.delta)
        try:
            charge = {f"{key}/again-{number}": (event, asked)}
            ledger.reserve(privacy.dataset, charge, plan.privacy_unit, NEIGHBORING_RELATION)
        except BudgetRefused as refused:
            known = (refused.dataset, refused.asked, refused.spent, refused.left)
            raise BudgetRefused(*known, why) from None
