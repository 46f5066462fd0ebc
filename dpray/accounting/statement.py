"""The guarantee as a plan and a privacy report state it, in the same words and keys."""

from __future__ import annotations

import math
from importlib.metadata import version
from typing import Any

from dpray.accounting.accountant import Cost, cost
from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.event import NEIGHBORING_RELATION, Event

NOT_COVERED = (
    "the public inputs: the model, the templates, the label set, the public size, all parameters",
    "what the model's own training data reveals",
    "running time, memory use and network traffic of the run",
    "that a run stopped, and how many batches were repeated, dropped or failed: a lost machine is "
    "taken to say nothing of the data",
    "a process that the operating system's kernel ends for want of memory: nobody can tell it from "
    "a lost machine, and it is repeated like one",
    "other releases of the same data that were not charged to this ledger",
    "facts that hold for many units: a unit's part in them is hidden, the facts are not",
    "everything in the folder private/, which is not for release",
)


def no_guarantee(privacy_unit: str, contribution_bound: int) -> dict[str, Any]:
    """Return the keys of `guarantee` for a run without noise: there is no epsilon."""
    return {
        "epsilon": None,
        "delta": None,
        "neighboring_relation": NEIGHBORING_RELATION,
        "privacy_unit": privacy_unit,
        "contribution_bound": contribution_bound,
        "accountant": None,
        "mechanisms": [],
        "not_private": True,
    }


def guarantee(
    event: Event, price: Cost, privacy_unit: str, contribution_bound: int
) -> dict[str, Any]:
    """Return the top-level keys that `plan --json` and `privacy_report.json` share, from the event
    that is charged."""
    terms = sorted(event.terms().items(), key=lambda term: term[0].name)
    return {
        "epsilon": price.epsilon,
        "delta": price.delta,
        "neighboring_relation": NEIGHBORING_RELATION,
        "privacy_unit": privacy_unit,
        "contribution_bound": contribution_bound,
        "accountant": {
            "name": "dpray over dp-accounting",
            "version": version("dp-accounting"),
            "bound": price.bound,
        },
        "mechanisms": [_mechanism(part, count, price.delta) for part, count in terms],
        "not_private": False,
    }


def _mechanism(event: Event, count: int, delta: float) -> dict[str, Any]:
    """Describe one mechanism of a plan: its parameters, how often it runs, its cost alone."""
    parameters = {key: value for key, value in event.to_json().items() if key != "type"}
    alone = cost(SelfComposed(event, count), delta)
    rho = event.zcdp_rho() * count
    return {
        "name": event.name,
        "parameters": parameters,
        "count": count,
        "cost": {
            "epsilon_alone": alone.epsilon,
            "delta": delta,
            "bound": alone.bound,
            # A subsampled Gaussian has none that is finite, and JSON has no infinity.
            "zcdp_rho": rho if math.isfinite(rho) else None,
        },
    }
