"""`release` runs both methods of a chain and releases the second one's records. The first one's
sequences of terms are a file in `private`, which the second reads as its public input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dpray.methods import part
from dpray.methods.chain.plan import ChainPlan, keys_named, with_terms, write_records
from dpray.runs.plan import Plan
from dpray.runs.session import Release, Session


def release(session: Session[ChainPlan]) -> Release:
    """Run one method after the other. After a crash, the first one gives the same sequences again:
    they follow from what it published."""
    plan, (one, two) = session.plan, session.plan.settings.links
    measured, first = run_link(session, 0, one, plan.first)
    file = session.folder.private / f"{one}.jsonl"
    write_records(file, measured.records)
    reading = with_terms(opened(session, plan.second), file)
    ready: Plan = part(reading.settings.name, "plan").with_public_files(reading)
    assert ready.method_event == plan.second.method_event
    written, second = run_link(session, 1, two, ready)
    session.plan = replace(plan, first=first, second=second)
    return Release(
        written.records, merged({one: measured.report, two: written.report}), written.model
    )


def run_link(
    session: Session[ChainPlan], place: int, name: str, plan: Plan
) -> tuple[Release, Plan]:
    """Run one method, and return its release and its plan: a training that was interrupted is
    charged for more steps."""
    with keys_named(place), session.link(name, opened(session, plan)) as own:
        try:
            released: Release = part(plan.settings.name, "release").release(own)
        finally:
            session.resume_hint = own.resume_hint
        return released, own.plan


def opened(session: Session[ChainPlan], plan: Plan) -> Plan:
    """Return a method's plan, with what is known only now: the actors' GPUs and the measured label
    proportions."""
    config = plan.config.model_copy(update={"runtime": session.config.runtime})
    return replace(plan, config=config, proportions=session.plan.proportions)


def merged(reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the methods' parts of the privacy report as one. Noise multipliers, sampling and
    public inputs stand under the methods' names; of other keys that both have, the second one's
    counts."""
    first, second = reports.values()
    by_name = {
        key: {name: report[key] for name, report in reports.items() if key in report}
        for key in ("noise_multiplier", "sampling", "public_inputs")
        if key in first or key in second
    }
    sources = dict.fromkeys((first["noise_source"], second["noise_source"]))
    return first | second | by_name | {"noise_source": "; ".join(sources)}
