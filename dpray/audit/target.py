"""What an audit is about, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dpray.accounting.accountant import cost
from dpray.accounting.events import Event
from dpray.types import InputError

FEWEST_TRIALS = 200

OnProgress = Callable[[str, int, int], None]
"""Told what is audited, how many of its draws are made, and of how many."""

Advance = Callable[[int], None]
"""Told how many more draws are made."""


class Target(Protocol):
    """One mechanism's real code beside the claim made for it."""

    @property
    def name(self) -> str: ...

    @property
    def how(self) -> str: ...

    @property
    def inputs(self) -> str:
        """The neighbouring inputs, in words."""

    @property
    def event(self) -> Event:
        """The claim for what is drawn."""

    def draws(self, trials: int) -> int:
        """How many draws `lower_bound` makes, for a progress bar."""

    def lower_bound(self, trials: int, delta: float, alpha: float, advance: Advance) -> float:
        """What the draws prove: epsilon is below it with probability `alpha` at most."""

    def most(self, trials: int, delta: float, alpha: float) -> float:
        """The largest bound so many trials could give: of a mechanism that hides nothing."""


@dataclass(frozen=True)
class Finding:
    """`claimed` and the bounds are epsilons at the plan's delta."""

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


def audit(
    target: Target,
    trials: int,
    delta: float,
    alpha: float,
    on_progress: OnProgress = lambda name, done, total: None,
) -> Finding:
    """The bound of one target beside its claim. A mechanism that keeps its claim is found not to
    with probability `alpha` at most. Raises InputError for too few trials."""
    if trials < FEWEST_TRIALS:
        raise InputError(f"trials: {trials} prove nothing, it takes {FEWEST_TRIALS} or more")
    total, done = target.draws(trials), 0

    def advance(more: int) -> None:
        nonlocal done
        done += more
        on_progress(target.name, done, total)

    advance(0)
    return Finding(
        name=target.name,
        how=target.how,
        inputs=target.inputs,
        claimed=cost(target.event, delta).epsilon,
        lower_bound=target.lower_bound(trials, delta, alpha, advance),
        most=target.most(trials, delta, alpha),
        trials=trials,
    )
