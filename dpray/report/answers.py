"""The answers of a release, computed from its privacy report once. The page, the dataset card and
the sheet for NIST SP 800-226 put the same ones into words."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpray.engines.model_path import plain_name
from dpray.report.tables import at_most, bound, one_in, person_in_words
from dpray.runs.privacy_report import PrivacyReport


@dataclass(frozen=True)
class Odds:
    """The meaning of epsilon and delta: an outcome is at most `times` as likely with a unit as
    without it, apart from the extra probability `one_in`, and the best guess is right at most
    `percent` of the time."""

    times: str
    one_in: str
    percent: str


@dataclass(frozen=True)
class Answers:
    """Without privacy there are no `odds`, and `guarantee` is empty. A report of dpray 0.1.0 has no
    `person`."""

    report: PrivacyReport
    guarantee: str
    made_by: str
    odds: Odds | None
    person: str | None
    delta_times_records: float | None
    public: dict[str, object]
    noise_sources: tuple[str, ...]
    unit: str
    model: str | None


def answers_of(report: PrivacyReport) -> Answers:
    """Return the answers, without empty inputs, and with a chain's first method by its name."""
    guarantee, odds, times_records = "", None, None
    if report.epsilon is not None and report.delta is not None:
        guarantee = f"epsilon {bound(report.epsilon)}, delta {bound(report.delta)}"
        percent = at_most(100 * attacker_accuracy(report.epsilon, report.delta), digits=4)
        odds = Odds(at_most(math.exp(min(report.epsilon, 700.0))), one_in(report.delta), percent)
        units = report.public_inputs.get("public_size")
        if isinstance(units, int) and report.privacy_unit == "record":
            times_records = report.delta * units
    first = {} if report.first is None else report.first.public_inputs
    public = {**report.public_inputs, **{f"first method's {key}": v for key, v in first.items()}}
    if "public_size" in public:
        counted = "records" if report.privacy_unit == "record" else "persons, by data.unit"
        public[f"public_size, in {counted}"] = public.pop("public_size")
    model = report.public_inputs.get("model")
    parts = (report,) if report.first is None else (report.first, report)
    return Answers(
        report,
        guarantee,
        ", then ".join(str(method["name"]) for method in report.methods),
        odds,
        None if report.persons is None else person_in_words(report),
        times_records,
        {key: value for key, value in public.items() if value not in (None, [], "")},
        tuple(dict.fromkeys(part.noise_source for part in parts)),
        "one record" if report.privacy_unit == "record" else report.privacy_unit,
        plain_name(model) if isinstance(model, str) else None,
    )


def attacker_accuracy(epsilon: float, delta: float) -> float:
    """Return the highest probability of guessing whether a unit was in the data, if both answers
    are equally likely at first: (e^eps + delta) / (e^eps + 1), from the sum of the two inequalities
    on error rates in Kairouz et al. (2015), Theorem 2.1."""
    return (1 + delta * math.exp(-epsilon)) / (1 + math.exp(-epsilon))
