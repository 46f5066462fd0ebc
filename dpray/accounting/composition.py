"""A composition rule adds up the costs of the runs on one data set against its budget.

A run's parameters may be chosen after seeing what earlier runs released, so only bounds that hold
under fully adaptive composition are offered. A budget names its composition once, at creation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from fractions import Fraction
from functools import reduce
from typing import ClassVar

import numpy as np

from dpray.accounting.accountant import rdp_to_epsilon
from dpray.accounting.event import Event, check_delta
from dpray.types import Budget

Total = tuple[Fraction | float, ...]
"""The exact sum of the charges; infinite if a charge has no finite cost."""


@dataclass(frozen=True)
class Charge:
    """A run's reservation: its frozen plan, and the (epsilon, delta) that it asked for.

    Raises ValueError for an epsilon below 0, a delta outside [0, 1), or a NaN.
    """

    event: Event
    reserved: Budget

    def __post_init__(self) -> None:
        if not self.reserved.epsilon >= 0:
            raise ValueError(f"epsilon must be a number >= 0, got {self.reserved.epsilon}")
        check_delta(self.reserved.delta)


@dataclass(frozen=True)
class BasicComposition:
    """Keeps the sums of the runs' epsilons and deltas within the budget.

    Sums are exact in the decimals as written, so 0.1 and 0.2 fit a budget of 0.3. The order of the
    charges does not matter.
    Proof: docs/privacy.md, section 6.4.
    """

    budget: Budget
    name: ClassVar[str] = "basic"

    def __post_init__(self) -> None:
        _check_budget(self.budget)

    def total(self, charges: Iterable[Charge]) -> Total:
        return reduce(self.add, charges, (Fraction(0), Fraction(0)))

    def add(self, total: Total, charge: Charge) -> Total:
        epsilon, delta = total
        return epsilon + _exact(charge.reserved.epsilon), delta + _exact(charge.reserved.delta)

    def spent(self, total: Total) -> Budget:
        epsilon, delta = total
        return Budget(float(epsilon), float(delta))

    def left(self, total: Total) -> Budget:
        epsilon, delta = total
        return Budget(
            _rounded_down(_exact(self.budget.epsilon) - epsilon),
            _rounded_down(_exact(self.budget.delta) - delta),
        )

    def is_exceeded(self, total: Total) -> bool:
        epsilon, delta = total
        return epsilon > _exact(self.budget.epsilon) or delta > _exact(self.budget.delta)

    def needed(self, total: Total) -> Budget | None:
        """Return a budget in few digits that holds the total and the present budget, or None if
        none does."""
        return _at_least(total[0], total[1], self.budget)


@dataclass(frozen=True)
class RenyiComposition:
    """Applies a Rényi filter (Feldman and Zrnic 2021): the runs' Rényi divergences at ONE order,
    fixed when the budget is created, add up to no more than the budget's epsilon at its delta.
    Proof: docs/privacy.md, section 6.5.
    """

    budget: Budget
    order: float
    name: ClassVar[str] = "renyi"

    def __post_init__(self) -> None:
        _check_budget(self.budget)
        if self.budget.delta == 0:
            raise ValueError("a budget composed by renyi needs a delta above 0")
        if not (math.isfinite(self.order) and self.order > 1.01):
            raise ValueError(f"order must be a finite number above 1.01, got {self.order}")

    def total(self, charges: Iterable[Charge]) -> Total:
        return reduce(self.add, charges, (Fraction(0),))

    def add(self, total: Total, charge: Charge) -> Total:
        divergence = float(charge.event.rdp((self.order,))[0])
        # Exact sums are rounded once, so that they do not depend on the order of the charges.
        return (total[0] + (Fraction(divergence) if math.isfinite(divergence) else math.inf),)

    def spent(self, total: Total) -> Budget:
        if not total[0]:
            return Budget(0.0, 0.0)
        epsilon = rdp_to_epsilon(float(total[0]), self.order, self.budget.delta)
        return Budget(epsilon, self.budget.delta)

    def left(self, total: Total) -> Budget:
        """Return the epsilon that is left, at the whole delta, which all runs share."""
        spent = self.spent(total)
        return Budget(max(0.0, self.budget.epsilon - spent.epsilon), self.budget.delta)

    def is_exceeded(self, total: Total) -> bool:
        return self.spent(total).epsilon > self.budget.epsilon

    def needed(self, total: Total) -> Budget | None:
        """Return a budget in few digits, at the same delta, that holds the total and the present
        budget, or None if none does."""
        return _at_least(_exact(self.spent(total).epsilon), 0, self.budget)


Composition = BasicComposition | RenyiComposition


def composition(name: str, budget: Budget, order: float | None = None) -> Composition:
    """Return the rule called `name` ("basic" or "renyi") for a budget; a new renyi budget without
    an `order` gets `default_order`. Raises ValueError for an unknown name or a bad budget."""
    if name == BasicComposition.name:
        return BasicComposition(budget)
    if name == RenyiComposition.name:
        return RenyiComposition(budget, default_order(budget) if order is None else order)
    raise ValueError(f"composition must be basic or renyi, got {name!r}")


def default_order(budget: Budget) -> float:
    """Return the order at which a budget pays for the most zCDP mechanisms, such as Gaussian
    ones."""
    _check_budget(budget)
    if budget.delta == 0:
        raise ValueError("a budget composed by renyi needs a delta above 0")
    orders = np.round(1 + np.geomspace(0.05, 1e4, 1000), 2)
    overhead = np.log1p(-1 / orders) - np.log(budget.delta * orders) / (orders - 1)
    return float(orders[np.argmax((budget.epsilon - overhead) / orders)])


def _rounded_down(exact: Fraction | float) -> float:
    """Round towards zero, so that a run may ask for exactly what is shown as left."""
    left = max(exact, Fraction(0))
    nearest = float(left)
    return math.nextafter(nearest, 0.0) if _exact(nearest) > left else nearest


def _at_least(epsilon: Fraction | float, delta: Fraction | float, budget: Budget) -> Budget | None:
    if math.inf in (epsilon, delta) or delta >= 1:
        return None
    up = Context(prec=6, rounding=ROUND_CEILING)

    def in_few_digits(exact: Fraction | float, present: float) -> float:
        exact = Fraction(exact)
        quotient = up.divide(Decimal(exact.numerator), Decimal(exact.denominator))
        return max(float(quotient), present)

    return Budget(in_few_digits(epsilon, budget.epsilon), in_few_digits(delta, budget.delta))


def _exact(value: float) -> Fraction | float:
    return Fraction(repr(float(value))) if math.isfinite(value) else math.inf


def _check_budget(budget: Budget) -> None:
    if not (math.isfinite(budget.epsilon) and budget.epsilon > 0):
        raise ValueError(f"epsilon must be a positive finite number, got {budget.epsilon}")
    check_delta(budget.delta)
