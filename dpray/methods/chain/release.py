"""`release` runs the methods of a chain one after the other, and releases the records of the last.
What the others release is a file in `private`, which the next one reads as its public input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dpray.methods import part
from dpray.methods.chain.plan import ChainPlan, keys_named, with_input, write_records
from dpray.runs.plan import Plan
from dpray.runs.session import Release, Session


def release(session: Session[ChainPlan]) -> Release:
    """Release what each method releases. After a crash, one that was done gives the same records
    again: they follow from what it published."""
    links, reports = dict(session.plan.links), {}
    before: Plan | None = None
    file: Path | None = None
    for name in links:
        plan = opened(session, name, before, file)
        with keys_named(name), session.link(name, plan) as own:
            try:
                released: Release = part(plan.settings.name, "release").release(own)
            finally:
                session.resume_hint = own.resume_hint
            reports[name] = released.report
            links[name] = own.plan  # a training that was interrupted was charged for more
        if name != list(links)[-1]:
            before, file = plan, session.folder.private / f"{name}.jsonl"
            write_records(file, released.records)
    session.plan = replace(session.plan, links=links)
    return Release(released.records, merged(reports), released.model)


def opened(session: Session[ChainPlan], name: str, before: Plan | None, file: Path | None) -> Plan:
    """Return a method's plan, with what is known only now: the actors' GPUs, the measured label
    proportions, and the file of what the method before it released."""
    link = session.plan.links[name]
    config = link.config.model_copy(update={"runtime": session.config.runtime})
    plan = replace(link, config=config, proportions=session.plan.proportions)
    if before is None:
        return plan
    ready: Plan = part(plan.settings.name, "plan").with_public_files(with_input(plan, before, file))
    assert ready.method_event == link.method_event
    return ready


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
