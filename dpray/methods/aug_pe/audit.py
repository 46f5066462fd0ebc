"""The audit of Aug-PE bounds the epsilon of its noisy votes."""

from __future__ import annotations

from collections.abc import Iterator

from dpray.auditing.shared_targets import votes_target
from dpray.auditing.target import Target
from dpray.methods.aug_pe.algorithm import AugPe


def targets(plan: AugPe) -> Iterator[Target]:
    """Yield one vote histogram, and those of all iterations together."""
    assert plan.votes is not None
    for iterations in sorted({1, plan.settings.iterations}):
        name = f"vote histogram, {iterations} iterations" if iterations > 1 else "vote histogram"
        yield votes_target(name, plan.votes, iterations)
