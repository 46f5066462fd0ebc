"""`calibrated_allowances` fixes, before the data is opened, what Poisson batches a label may get
once the labels' proportions are measured."""

from __future__ import annotations

import functools
import math

from dpray.accounting.accountant import cost
from dpray.accounting.calibration import calibrate
from dpray.accounting.composed_events import Composed
from dpray.accounting.event import Event
from dpray.accounting.events import ExponentialMechanism
from dpray.mechanisms.batch_allowances import Allowance, BatchAllowances, probability
from dpray.types import Budget, InputError

STEP = 1.02
"""Numbers of batches are searched for in steps of this factor: each takes a while to price."""

MOST_STEPS = 800
"""So many steps from one batch are over a million batches."""

MORE_STEPS = 80
"""An allowance has at most so many steps, a factor of 4.9, more than that of a smaller share."""

LADDER = 1.5
"""Neighbouring allowances are for shares this factor apart."""

ROUNDING_ROOM = 0.95
"""A label that is as common as the others, but for the noise of the histogram, has an allowance at
this part of its share."""

JOINT_ROOM = 0.002
"""The worst of all allowances costs, beside the histogram, so little more than each."""


@functools.lru_cache(maxsize=8)
def calibrated_allowances(
    sizes: tuple[int, int],
    labels: int,
    smallest: float,
    before: Event,
    draw: ExponentialMechanism,
    draws: int,
    budget: Budget,
) -> BatchAllowances:
    """Return allowances each of which, and the worst of which, use up the budget beside what comes
    `before`, the histogram included, for shares from `smallest` on; `sizes` are the data's public
    one and that of a batch.

    A share for which the budget does not pay for one batch has none. Raises InputError where that
    holds for all of them.
    """
    found: list[Allowance] = []
    steps = 1.0
    for share in shares(labels, smallest):
        q = probability(*sizes, share)

        def event(steps: float, share: float = share, q: float = q) -> Event:
            return Composed(
                (before, Allowance(share, q, batches_after(steps)).dp_event(draw, draws))
            )

        try:
            steps = calibrate(
                event,
                budget.epsilon * (1 - JOINT_ROOM),
                budget.delta,
                bracket=(steps, steps + MORE_STEPS if found else MOST_STEPS),
                increasing=True,
                integer=True,
            )
        except ValueError:
            continue
        found.append(Allowance(share, q, batches_after(steps)))
    if not found:
        raise too_little(budget, draws)
    return within(budget, before, draw, draws, BatchAllowances(*sizes, tuple(reversed(found))))


def batches_after(steps: float) -> int:
    """Return the number of batches at a step of the search: 1 at the first."""
    return math.floor(STEP ** (steps - 1))


def shares(labels: int, smallest: float) -> list[float]:
    """Return `smallest` and rising shares above it, `LADDER` apart, one of them for labels that are
    equally common."""
    equal = min(1.0, ROUNDING_ROOM / labels)
    ladder = (equal * LADDER**step for step in range(-99, 100))
    return [smallest, *(share for share in ladder if smallest < share <= 1)]


def within(
    budget: Budget,
    before: Event,
    draw: ExponentialMechanism,
    draws: int,
    found: BatchAllowances,
) -> BatchAllowances:
    """Take batches off until the worst of all allowances is within the budget, too. Raises
    InputError where that takes all."""

    def fits(allowances: BatchAllowances) -> bool:
        event = Composed((before, allowances.dp_event(draw, draws)))
        return cost(event, budget.delta).epsilon <= budget.epsilon

    while not fits(found):
        if found == (left := found.fewer()):
            raise too_little(budget, draws)
        found = left
    return found


def too_little(budget: Budget, draws: int) -> InputError:
    return InputError(
        f"privacy.epsilon: {budget.epsilon:g} does not pay for one Poisson batch of {draws} "
        "private tokens beside measured label proportions; a larger data.public_size, "
        "method.batch_size or method.temperature, or fewer tokens (method.max_tokens), is needed"
    )
