"""Private selection releases the best of several outputs and nothing of the others (Liu and Talwar
2019; Papernot and Steinke 2022)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dpray.accounting.event import Array, Event, NonNegative, losses
from dpray.accounting.events import DiscreteLaplace

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution as Pld

ORDERS = np.array([1.0, *np.geomspace(1.01, 1e4, 400)])
"""The second order of the bound is one of these; every one of them is valid."""

TAIL = 1e-12
"""A selection without a pure epsilon has a loss without bound with this probability, at most: far
less than any delta that a distribution of losses is asked for."""


@dataclass(frozen=True)
class PrivateSelection(Event):
    """Runs a mechanism of cost `event` K times on the same data, independently, and releases the
    best of the outputs alone, by an order that does not depend on the data. K is drawn beforehand
    from the truncated negative binomial distribution of `shape` eta >= 0 and `gamma` in (0, 1)
    (`dpray.mechanisms.private_selection`), whatever the data, and stays secret.

    With an event of Renyi curve R the cost is, at every order a > 1 and for every b >= 1,
    `R(a) + (1 + eta) ((1 - 1/b) R(b) + log(1/gamma) / b) + log(E[K]) / (a - 1)` (Papernot and
    Steinke 2022, Theorem 2), and an event of pure epsilon costs (2 + eta) epsilon (b and then a
    without bound). Proof: docs/privacy.md, section 6.12.
    """

    event: Event
    shape: NonNegative
    gamma: float
    name: ClassVar[str] = "private_selection"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma >= 1:
            raise ValueError(f"gamma must be below 1, got {self.gamma}")

    @property
    def expected_runs(self) -> float:
        return expected_runs(self.shape, self.gamma)

    def pure_epsilon(self) -> float:
        return (2 + self.shape) * self.event.pure_epsilon()

    def rdp(self, orders: tuple[float, ...]) -> Array:
        inner = self.event.rdp(tuple(ORDERS[1:]))
        # At b = 1 the first part is 0 times a divergence that is finite.
        first = (1 - 1 / ORDERS) * np.concatenate([[0.0], inner])
        best = float(np.nanmin(first - math.log(self.gamma) / ORDERS))
        extra = (1 + self.shape) * min(best, self.event.pure_epsilon())
        excess = np.asarray(orders) - 1
        found = self.event.rdp(orders) + extra + math.log(self.expected_runs) / excess
        return np.minimum(found, super().rdp(orders))

    def pld(self, interval: float, count: int) -> Pld:
        """Return that of randomised response with the pure epsilon, which is no better; where there
        is none, that of an epsilon at `TAIL` by the Renyi curve."""
        pure = self.pure_epsilon()
        if not math.isfinite(pure):
            from dp_accounting.pld.common import DifferentialPrivacyParameters
            from dp_accounting.rdp import compute_epsilon

            orders = tuple(ORDERS[1:])
            epsilon, _ = compute_epsilon(orders, self.rdp(orders), TAIL)
            pair = DifferentialPrivacyParameters(float(epsilon), TAIL)
            one = losses().from_privacy_parameters(pair, value_discretization_interval=interval)
            return one.self_compose(count)
        # One rounding of the quotient would be on the wrong side by half a unit in the last place.
        response = DiscreteLaplace(math.nextafter(1.0 / pure, 0.0), 1)
        # At a large loss, exponentials overflow that are not used, or that divide.
        with np.errstate(over="ignore"):
            return response.pld(interval, count)


def expected_runs(shape: float, gamma: float) -> float:
    """Return E[K], the mean of the truncated negative binomial distribution (Papernot and Steinke
    2022, Definition 1)."""
    if shape == 0:
        return (1 / gamma - 1) / math.log(1 / gamma)
    return shape * (1 - gamma) / (gamma * -math.expm1(shape * math.log(gamma)))
