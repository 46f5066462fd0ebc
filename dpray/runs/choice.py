"""A method's best answer to one question: so many texts of this data at this epsilon. It is made
from public numbers, before anything is run."""

from __future__ import annotations

from dataclasses import dataclass

from dpray.runs.plan import Plan


@dataclass(frozen=True)
class Signal:
    """A signal says how far what a method learns from the private records is above its noise.

    `value` and `enough` are in a unit of the method's own, which `meaning` says: they compare a
    method with itself, at another epsilon or with more records, and not with another method.
    """

    value: float
    enough: float
    meaning: str

    @property
    def is_enough(self) -> bool:
        return self.value >= self.enough


@dataclass(frozen=True)
class Choice:
    """A plan whose free settings are chosen, and the reasons. There is no `signal` where
    no public file says enough for one."""

    plan: Plan
    signal: Signal | None
    reasons: tuple[str, ...]
