"""`release` runs the methods of a chain one after the other, each with what the one before it
released, and releases the records of the last."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dpray.methods import part
from dpray.methods.chain.plan import ChainPlan, keys_named
from dpray.runs.plan import Handed
from dpray.runs.session import Release, Session


def release(session: Session[ChainPlan]) -> Release:
    """Go through the methods. After a crash, one that was done gives the same records again: they
    follow from what it published."""
    stages, reports = dict(session.plan.stages), {}
    handed: Handed | None = None
    for name, method in zip(stages, session.plan.settings.methods, strict=True):
        given = stages[name] if handed is None else stages[name].given(handed)
        with keys_named(name), session.stage(name, given) as of_stage:
            try:
                released: Release = part(method.name, "release").release(of_stage)
            finally:
                session.resume_hint = of_stage.resume_hint
            reports[name] = released.report
            stages[name] = of_stage.plan  # a training that was interrupted was charged for more
            if name != list(stages)[-1]:
                handed = Handed.of(released.records)
    session.plan = replace(session.plan, stages=stages)
    return Release(released.records, merged(reports), released.model)


def merged(reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the methods' parts of the privacy report as one. Noise multipliers, sampling and
    public inputs stand under the methods' names; of other keys that several have, the last one's
    counts."""
    named = {
        key: {name: report[key] for name, report in reports.items() if key in report}
        for key in ("noise_multiplier", "sampling", "public_inputs")
        if any(key in report for report in reports.values())
    }
    sources = dict.fromkeys(report["noise_source"] for report in reports.values())
    caveats = dict.fromkeys(c for report in reports.values() for c in report.get("not_covered", ()))
    whole: dict[str, Any] = {}
    for report in reports.values():
        whole |= report
    whole |= named | {
        "llm_calls": sum(report["llm_calls"] for report in reports.values()),
        "noise_source": "; ".join(sources),
    }
    return whole | ({"not_covered": list(caveats)} if caveats else {})
