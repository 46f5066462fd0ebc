"""`release` runs both methods of a chain and returns the second one's records. The first one's
sequences of terms are written to a file in `private`, which the second one reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dpray.methods import part
from dpray.methods.chain.plan import ChainPlan, keys_named, with_terms, write_records
from dpray.runs.plan import Plan
from dpray.runs.session import Release, Session
from dpray.types import RunFailed


def release(session: Session[ChainPlan]) -> Release:
    """Run one method after the other. After a crash, the first one makes the same sequences again,
    from its published outputs."""
    plan, (one, two) = session.plan, session.plan.settings.links
    measured, first = run_link(session, 0, plan.first)
    file = session.folder.private / f"{one}.jsonl"
    write_records(file, measured.records)
    second: Plan = part(plan.second.settings.name, "plan").with_public_files(
        with_terms(plan.second, file)
    )
    check_same_event(second, plan.second)
    written, second = run_link(session, 1, second)
    session.plan = replace(plan, first=first, second=second)
    reports = {one: measured.report, two: written.report}
    return Release(written.records, merged(reports), written.model)


def check_same_event(plan: Plan, charged: Plan) -> None:
    """Raise RunFailed if a plan that reads released terms is not the one that was charged. It is no
    `assert`, which `python -O` leaves out: the guarantee rests on it."""
    if plan.method_event != charged.method_event:
        raise RunFailed("the second method's cost depends on what the first one released")


def run_link(session: Session[ChainPlan], place: int, plan: Plan) -> tuple[Release, Plan]:
    """Run one method, with the actors' GPUs, the files' digests and the measured label proportions,
    which its plan did not know. Return its release and its plan as charged: an interrupted training
    is charged for more steps."""
    known = {"runtime": session.config.runtime, "data": session.config.data}
    config = plan.config.model_copy(update=known)
    plan = replace(plan, config=config, proportions=session.plan.proportions)
    name = session.plan.settings.links[place]
    with keys_named(place), session.link(name, plan) as own:
        try:
            released: Release = part(plan.settings.name, "release").release(own)
        finally:
            session.resume_hint = own.resume_hint
        return released, own.plan


def merged(reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Merge the methods' parts of the privacy report. Noise multipliers, sampling and public inputs
    are kept by method; for other keys that both have, the second method's value wins."""
    first, second = reports.values()
    by_name = {
        key: {name: report[key] for name, report in reports.items() if key in report}
        for key in ("noise_multiplier", "sampling", "public_inputs")
        if key in first or key in second
    }
    sources = dict.fromkeys((first["noise_source"], second["noise_source"]))
    return first | second | by_name | {"noise_source": "; ".join(sources)}
