"""A sheet for the questions of NIST SP 800-226, "Guidelines for Evaluating Differential Privacy
Guarantees" (Near, Darais, Lefkovitz and Howarth 2025).

The publication orders what a guarantee rests on as a pyramid. The sheet goes from its top, the
privacy parameters, to its bottom, the collection of the data. The questions are in our words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpray.report.page import odds_of, templates
from dpray.report.tables import bound, number

Report = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """One question of the sheet. `source` is a key of the privacy report or a page of dpray's
    documentation; without one, anyone who has the data has to answer."""

    question: str
    answer: str = ""
    source: str | None = None


def privacy_sheet(report: Report, name: str) -> str:
    """Return the sheet of a release as one HTML page. The run was private."""
    parts = answers(report)
    open_questions = sum(each.source is None for part in parts.values() for each in part)
    template = templates().get_template("nist.html.j2")
    return template.render(report=report, name=name, parts=parts, open_questions=open_questions)


def answers(report: Report) -> Mapping[str, Sequence[Answer]]:
    """Return the answers, by part of the pyramid."""
    return {
        "Privacy parameters and unit": _guarantee(report),
        "Algorithms": _algorithms(report),
        "Correct implementation": _implementation(report),
        "Trust, access and data": _deployment(report),
    }


def _guarantee(report: Report) -> list[Answer]:
    epsilon, delta = report["epsilon"], report["delta"]
    odds, units = odds_of(report), report["public_inputs"].get("public_size")
    worst = f"An outcome is at most {odds['odds']} times as likely with a unit as without it"
    if odds["one_in"]:
        worst += f", apart from a probability of {odds['one_in']}"
    of_all = ""
    if units and report["privacy_unit"] == "record":
        of_all = f" With {number(units)} records, delta times records is {delta * units:.2g}."
    return [
        Answer(
            "How large are epsilon and delta?",
            f"epsilon {bound(epsilon)}, delta {bound(delta)}, both upper bounds.{of_all}",
            "epsilon, delta",
        ),
        Answer(
            "What do they mean at worst?",
            f"{worst}. Anyone who guesses whether one unit was in the data, if both were "
            f"equally likely before, is right at most {odds['attacker_percent']} % of the time.",
            "epsilon, delta",
        ),
        Answer(
            "Which definition is it?",
            "(epsilon, delta)-differential privacy of the whole release, in the central model; "
            f"neighbouring relation: {report['neighboring_relation'].replace('_', ' ')} unit.",
            "neighboring_relation",
        ),
        Answer(
            "Who or what is one unit?",
            f"{report['privacy_unit']}. Records of one unit that count, at most: "
            f"{report['contribution_bound']}.{_hazard(report['privacy_unit'])}",
            "privacy_unit, contribution_bound",
        ),
        Answer("How do several releases add up?", _budget(report.get("ledger")), "ledger"),
    ]


def _hazard(unit: str) -> str:
    if unit != "record":
        return ""
    return (
        " A person with several records is protected record by record: with k of them the loss is "
        "up to k epsilon, and delta grows by more than k times."
    )


def _budget(ledger: Report | None) -> str:
    if ledger is None:
        return "This run kept no ledger."
    budget, spent = ledger["budget"], ledger["spent"]
    return (
        f"A ledger adds up all runs on this data set, this one included: epsilon "
        f"{number(spent['epsilon'])} of {number(budget['epsilon'])} were spent when this release "
        "was made, and a run beyond the budget is refused. Releases by other means are not in it."
    )


def _algorithms(report: Report) -> list[Answer]:
    names = (
        f"{each['name'].replace('_', ' ')} ({number(each['count'])} times)"
        for each in report["mechanisms"]
    )
    accountant, first = report["accountant"], report.get("first", {}).get("public_inputs", {})
    public = report["public_inputs"] | {
        f"first method's {key}": each for key, each in first.items()
    }
    return [
        Answer(
            "Which mechanisms read private data?",
            f"{', '.join(names)}. All else is computed from their outputs and from public inputs.",
            "mechanisms",
        ),
        Answer(
            "How is the total computed?",
            f"{accountant['name']} {accountant['version']}, bound: {accountant['bound']}. "
            "Parameters are fixed before the data is opened.",
            "accountant",
        ),
        Answer("What did tuning cost?", f"{report['tuning_cost']}.", "tuning_cost"),
        Answer(
            "What is taken to be public?",
            "; ".join(
                f"{key.replace('_', ' ')}: {_listed(value)}"
                for key, value in public.items()
                if value not in (None, [], "")
            ),
            "public_inputs",
        ),
        Answer(
            "Is synthetic data as useful as real data, and equally so for all groups?",
            "No guarantee says so. Noise hides single units, so that what few units have in common "
            "is lost first. Measure it with `dpray evaluate`, for the owner's eyes.",
            "not_covered",
        ),
    ]


def _listed(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps({key: each for key, each in value.items() if each is not None})
    return ", ".join(map(_listed, value)) if isinstance(value, list) else str(value)


def _implementation(report: Report) -> list[Answer]:
    numerics = report.get("numerics")
    rows = f" Model numerics: {numerics['dtype']}." if numerics else ""
    of_methods = (report["first"], report) if "first" in report else (report,)
    sources = dict.fromkeys(each["noise_source"] for each in of_methods)
    return [
        Answer(
            "Where is the proof, and what was tested?",
            "Each mechanism's sensitivity and cost are proved in docs/privacy.md. Tests accept the "
            "right noise and reject wrong noise; `dpray audit` measures lower bounds.",
            "docs/privacy.md",
        ),
        Answer(
            "Where does randomness come from, and are floating-point numbers safe?",
            f"{'; '.join(sources)}.{rows}",
            "noise_source, numerics",
        ),
        Answer(
            "What is not covered, side channels included?",
            "; ".join(each for each in report["not_covered"]) + ".",
            "not_covered",
        ),
        Answer(
            "Which software made the release?",
            ", ".join(f"{name} {version}" for name, version in report["versions"].items()) + ".",
            "versions",
        ),
    ]


def _deployment(report: Report) -> list[Answer]:
    return [
        Answer(
            "Who is trusted?",
            "Anyone who runs dpray, its machines, its ledger and its model endpoint sees private "
            "records or could change the noise. Readers of the release are not trusted.",
            "SECURITY.md",
        ),
        Answer("Who may read the private data and the folder private/, and how is that kept?"),
        Answer("How was the data collected, and did people agree to this use?"),
        Answer("How long is the raw data kept, and who may ask for it to be deleted?"),
        Answer("Who decided on epsilon, delta and the unit, and why these?"),
    ]
