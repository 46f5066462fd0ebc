"""After an error ended an attempt, the run repeats what was lost, or stops."""

from __future__ import annotations

from collections.abc import Iterable

from dpray.accounting.ledger import Ledger
from dpray.engines.base import may_be_repeated
from dpray.runs import cluster
from dpray.types import DprayError


def reason_to_repeat(error: Exception) -> str | None:
    """Say why the units under way may run again at no cost: a machine was lost or a model failed,
    and nobody saw any output. Returns None where they may not, because dpray's own code raised or
    the memory did not suffice."""
    if may_be_repeated(error):
        return str(error)
    return "actors were lost" if cluster.was_lost(error) else None


def may_run_again(error: Exception) -> bool:
    """Return whether the mechanism that raised this has not failed by itself. A DprayError is about
    the input, or says itself that the run can go on."""
    return isinstance(error, DprayError) or reason_to_repeat(error) is not None


def fail_under_way(ledger: Ledger, keys: Iterable[str], attempt_id: str) -> list[str]:
    """Record as failed the units that this attempt began and did not publish.

    Ray ended one of its processes for want of memory, and how much it needs depends on the private
    rows. Returns all units of these charges that failed.
    """
    failed: list[str] = []
    for key in keys:
        for unit, attempt in list(ledger.unfinished(key)):
            if attempt == attempt_id:
                ledger.fail(key, unit, attempt, "OutOfMemoryError")
        failed += [unit for unit, _ in ledger.failed(key)]
    return failed
