"""An audit bounds the epsilon of each `Target` and returns a `Finding` for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dpray.accounting.accountant import cost
from dpray.accounting.event import Event
from dpray.types import InputError, OnProgress

FEWEST_TRIALS = 200


class Target(Protocol):
    """Runs one mechanism's real code and states the claim made for it."""

    @property
    def name(self) -> str: ...

    @property
    def how(self) -> str:
        """Describe the audit's method in words."""

    @property
    def inputs(self) -> str:
        """Describe the neighbouring inputs in words."""

    @property
    def event(self) -> Event:
        """Return the claim for what is drawn."""

    def lower_bound(
        self, trials: int, delta: float, alpha: float, on_progress: OnProgress
    ) -> float:
        """Draw, and return what the draws prove: the true epsilon is below the bound with
        probability `alpha` at most."""

    def most(self, trials: int, delta: float, alpha: float) -> float:
        """Return the largest bound of so many trials, where the mechanism hides nothing."""


@dataclass(frozen=True)
class Finding:
    """Holds a target's bounds and its claim, which are epsilons at the same delta."""

    name: str
    how: str
    inputs: str
    claimed: float
    lower_bound: float
    most: float
    trials: int

    @property
    def holds(self) -> bool:
        return self.lower_bound <= self.claimed


def audit_target(
    target: Target,
    trials: int,
    delta: float,
    alpha: float,
    on_progress: OnProgress = lambda progress: None,
) -> Finding:
    """Bound one target's epsilon. A mechanism that keeps its claim is reported as breaking it with
    probability `alpha` at most. Raises InputError for too few trials."""
    if trials < FEWEST_TRIALS:
        raise InputError(f"trials: {trials} prove nothing, it takes {FEWEST_TRIALS} or more")
    return Finding(
        name=target.name,
        how=target.how,
        inputs=target.inputs,
        claimed=cost(target.event, delta).epsilon,
        lower_bound=target.lower_bound(trials, delta, alpha, on_progress),
        most=target.most(trials, delta, alpha),
        trials=trials,
    )
