"""A plan names its audit's targets; the audit returns a `Finding` for each `Target`."""

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
        """The audit's method, in words."""

    @property
    def inputs(self) -> str:
        """The neighbouring inputs, in words."""

    @property
    def event(self) -> Event:
        """The privacy event that is claimed for one draw."""

    def lower_bound(
        self, trials: int, delta: float, alpha: float, on_progress: OnProgress
    ) -> float:
        """Draw, and return a lower bound: the true epsilon is below it with probability at most
        `alpha`."""

    def most(self, trials: int, delta: float, alpha: float) -> float:
        """Return the largest bound that `trials` can prove, for a mechanism that hides nothing."""


@dataclass(frozen=True)
class Finding:
    """A target's claim and its bounds, all of them epsilons at the same delta."""

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
    """Bound one target's epsilon. A correct mechanism is reported as breaking its claim with
    probability at most `alpha`. Raises InputError for too few trials."""
    if trials < FEWEST_TRIALS:
        raise InputError(f"trials: {trials} prove nothing; at least {FEWEST_TRIALS} are needed")
    return Finding(
        name=target.name,
        how=target.how,
        inputs=target.inputs,
        claimed=cost(target.event, delta).epsilon,
        lower_bound=target.lower_bound(trials, delta, alpha, on_progress),
        most=target.most(trials, delta, alpha),
        trials=trials,
    )
