"""The privacy report is one self-contained HTML page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, UndefinedError

from dpray.report import pictures
from dpray.report.figures import at_most, number, one_in
from dpray.report.tables import SYNTHETIC, evaluation_tables
from dpray.types import InputError

# A report has to state these; a page that silently left one out would look complete.
REQUIRED = (
    "epsilon", "delta", "neighboring_relation", "privacy_unit", "contribution_bound", "accountant",
    "mechanisms", "sampling", "tuning_cost", "public_inputs", "noise_source", "not_covered",
    "not_private", "records", "method", "versions",
)  # fmt: skip

# The page shows these sections of the resolved configuration. The others name places (paths,
# addresses), and `privacy` is in the report itself.
CONFIG_SECTIONS = ("data", "method", "engine", "embedder")
CONFIG_PLACES = frozenset({"path", "api_key", "base_url"})

RELATIONS = {"add_or_remove_one": "one privacy unit is added or removed, the rest stays"}

BATCHES = {
    "total": "planned",
    "published": "published, each exactly once",
    "repeated": "run again, because they were lost or interrupted before anything was published",
    "dropped": "left out: lost, interrupted, or not finished",
    "failed": "failed by an error of their own; never repeated",
    "missing": "published, but their records are not in this folder",
}


def render_report(
    privacy_report: Mapping[str, Any],
    samples: Sequence[Mapping[str, Any]],
    evaluation: Mapping[str, Any] | None,
    run: Mapping[str, Any],
    public: bool,
) -> str:
    """Return one HTML page that needs no network and no script.

    `privacy_report` and `run` are the content of `privacy_report.json` and `run.json`; `samples`
    are synthetic records (`text`, `label`, other public fields), shown in the order given.
    `evaluation` is that of `evaluation.json` or None; its numbers are computed from private data
    and stand in a part of their own, between BEGIN PRIVATE and END PRIVATE, which a `public` page
    does not have. Nor does a public page show the iterations of a run that is not private: their
    counts have no noise.

    Raises InputError that names the keys `privacy_report` lacks, or a key that another version of
    dpray wrote differently.
    """
    missing = [key for key in REQUIRED if key not in privacy_report]
    if missing:
        raise InputError(f"privacy_report.json: no {', '.join(missing)}")
    template = templates().get_template("report.html.j2")
    relation, ledger = privacy_report["neighboring_relation"], privacy_report.get("ledger")
    methods = _methods(privacy_report["method"])
    hidden = public and privacy_report["not_private"]
    try:
        return template.render(
            report=privacy_report,
            batches=privacy_report.get("batches"),
            batch_words=BATCHES,
            ledger=ledger,
            spent_share=_spent_share(ledger),
            relation=RELATIONS.get(relation, relation),
            made_by=", then ".join(each["name"] for each in methods),
            batch_kind=_of("private_prediction", methods).get("batches"),
            votes={"selection": "rank"} | _of("aug_pe", methods),
            **_in_words(privacy_report["epsilon"], privacy_report["delta"]),
            iterations=None if hidden else privacy_report.get("iterations"),
            pictures=pictures,
            samples=samples,
            evaluation=None if public else evaluation,
            tables={} if public else evaluation_tables(evaluation or {}),
            synthetic_row=SYNTHETIC,
            config=_shown_config(run.get("config", {}), privacy_report["method"]),
        )
    except (UndefinedError, KeyError, TypeError) as error:
        # They name keys and types, never a value.
        raise InputError(
            f"privacy_report.json, evaluation.json: written by another version of dpray ({error})"
        ) from None
    except Exception as error:
        # These may name a value.
        kind = type(error).__name__
        raise InputError(
            f"privacy_report.json, evaluation.json, run.json: not as dpray writes them ({kind})"
        ) from None


def templates() -> Environment:
    """Return the pages' templates: every value is escaped, and none may be missing."""
    environment = Environment(
        loader=PackageLoader("dpray.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # A key as words: `noise_multiplier` -> `noise multiplier`.
    environment.filters |= {"number": number, "words": lambda key: key.replace("_", " ")}
    return environment


def _methods(method: Any) -> list[dict[str, Any]]:
    """Return the method with its keys, or the chained methods; of an early version, the name."""
    if not isinstance(method, Mapping):
        return [{"name": method}]
    return [dict(each) for each in method.get("methods", [method])]


def _of(name: str, methods: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return next((each for each in methods if each["name"] == name), {})


def _in_words(epsilon: float | None, delta: float | None) -> dict[str, Any]:
    """Explain the guarantee in numbers for people; a run without one has none."""
    if epsilon is None or delta is None:
        return {}
    return {
        "odds": at_most(math.exp(min(epsilon, 700.0))),
        "one_in": one_in(delta),
        "attacker_percent": at_most(100 * attacker_accuracy(epsilon, delta), digits=4),
    }


def attacker_accuracy(epsilon: float, delta: float) -> float:
    """Return the highest probability of being right about whether one unit was in the data, where
    both answers are equally likely beforehand: (e^eps + delta) / (e^eps + 1), from the sum of the
    two inequalities on error rates in Kairouz et al. (2015), Theorem 2.1."""
    return (1 + delta * math.exp(-epsilon)) / (1 + math.exp(-epsilon))


def _spent_share(ledger: Mapping[str, Any] | None) -> float:
    if not ledger or not ledger["budget"]["epsilon"]:
        return 0.0
    return min(1.0, max(0.0, ledger["spent"]["epsilon"] / ledger["budget"]["epsilon"]))


def _shown_config(config: Mapping[str, Any], method: Any) -> dict[str, dict[str, Any]]:
    """Return the configuration's sections without places, with the method's keys as resolved."""
    sections = {name: config[name] for name in CONFIG_SECTIONS if config.get(name)}
    if isinstance(method, Mapping):
        sections["method"] = method
    return {
        name: {k: v for k, v in keys.items() if k not in CONFIG_PLACES}
        for name, keys in sections.items()
    }
