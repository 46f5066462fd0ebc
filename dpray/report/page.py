"""The privacy report as one self-contained HTML page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, UndefinedError

from dpray.report.evaluation_pictures import PICTURES
from dpray.report.pictures import iterations_svg
from dpray.types import InputError

# METHODS.md, section 5, last point: what a report has to state. A page that silently left one out
# would look complete.
REQUIRED = (
    "epsilon", "delta", "neighboring_relation", "privacy_unit", "contribution_bound", "accountant",
    "mechanisms", "sampling", "tuning_cost", "public_inputs", "noise_source", "not_covered",
    "not_private", "records", "method", "versions",
)  # fmt: skip

# Shown of the resolved configuration. The rest names places (paths, addresses) and is nobody's
# business; what `privacy` holds is in the report proper.
CONFIG_SECTIONS = ("data", "method", "engine", "embedder")
CONFIG_PLACES = frozenset({"path", "api_key", "base_url"})

RELATIONS = {"add_or_remove_one": "one privacy unit is added or removed, the rest stays"}

BATCHES = {
    "total": "planned",
    "published": "published, each exactly once",
    "repeated": "run again, because their machine was lost before anything was published",
    "dropped": "dropped, because their machine was lost",
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
    """One HTML page that needs no network and no script.

    `privacy_report` and `run` are what `privacy_report.json` and `run.json` hold; `samples` are
    synthetic records (`text`, `label`, other public fields), shown in the order given. `evaluation`
    is `evaluation.json` or None; its numbers are computed from private data and stand in one part
    of their own, between BEGIN PRIVATE and END PRIVATE, which a `public` page does not have. Nor
    does it show the iterations of a run that is not private: their counts have no noise.

    Raises `InputError` that names the keys `privacy_report` lacks, or a key that another version of
    dpray wrote otherwise.
    """
    missing = [key for key in REQUIRED if key not in privacy_report]
    if missing:
        raise InputError(f"privacy_report.json: no {', '.join(missing)}")
    environment = Environment(
        loader=PackageLoader("dpray.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "words": words, "spread": spread}
    template = environment.get_template("report.html.j2")
    try:
        return template.render(
            report=privacy_report,
            batches=privacy_report.get("batches"),
            batch_words=BATCHES,
            ledger=privacy_report.get("ledger"),
            spent_share=_spent_share(privacy_report.get("ledger")),
            relation=RELATIONS.get(
                privacy_report["neighboring_relation"], privacy_report["neighboring_relation"]
            ),
            **_in_words(privacy_report["epsilon"], privacy_report["delta"]),
            iterations=None
            if public and privacy_report["not_private"]
            else privacy_report.get("iterations"),
            iterations_svg=iterations_svg,
            **PICTURES,
            samples=samples,
            evaluation=None if public else evaluation,
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


def _in_words(epsilon: float | None, delta: float | None) -> dict[str, Any]:
    """What the guarantee means; nothing for a run that has none."""
    if epsilon is None or delta is None:
        return {}
    return {
        "odds": at_most(math.exp(min(epsilon, 700.0))),
        "one_in": one_in(delta),
        "attacker_percent": at_most(100 * attacker_accuracy(epsilon, delta), digits=4),
    }


def attacker_accuracy(epsilon: float, delta: float) -> float:
    """The most often anyone can be right about whether one unit was in the data, where both answers
    are equally likely beforehand: (e^eps + delta) / (e^eps + 1), from the sum of the two
    inequalities on error rates in Kairouz et al. (2015), Theorem 2.1."""
    return (1 + delta * math.exp(-epsilon)) / (1 + math.exp(-epsilon))


def at_most(value: float, digits: int = 3) -> str:
    """A bound for people: rounded up to so many significant digits."""
    step = 10.0 ** (math.floor(math.log10(value)) + 1 - digits)
    rounded = math.ceil(value / step * (1 - 1e-12)) * step
    whole = rounded >= 10 ** (digits - 1)
    return f"{rounded:,.0f}" if whole else f"{rounded:.{digits}g}"


def one_in(probability: float) -> str:
    """A small probability for people, "1 in 1,000,000", never understated; empty for zero."""
    return f"1 in {math.floor(1 / probability * (1 + 1e-12)):,}" if probability > 0 else ""


def number(value: float) -> str:
    """A number for people: thousands apart, six significant digits, 1e-6 instead of 1e-06."""
    if isinstance(value, int):
        return f"{value:,}"
    mantissa, _, exponent = f"{value:.6g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def spread(value: Mapping[str, float], digits: int) -> str:
    return f"{value['mean']:.{digits}f} ± {value['deviation']:.{digits}f}"


def words(name: str) -> str:
    """A key as words: `noise_multiplier` -> `noise multiplier`."""
    return name.replace("_", " ")


def _spent_share(ledger: Mapping[str, Any] | None) -> float:
    if not ledger or not ledger["budget"]["epsilon"]:
        return 0.0
    return min(1.0, max(0.0, ledger["spent"]["epsilon"] / ledger["budget"]["epsilon"]))


def _shown_config(config: Mapping[str, Any], method: Any) -> dict[str, dict[str, Any]]:
    """The configuration's sections without places; the method's keys as the run resolved them."""
    sections = {name: config[name] for name in CONFIG_SECTIONS if config.get(name)}
    if isinstance(method, Mapping):
        sections["method"] = method
    return {
        name: {k: v for k, v in keys.items() if k not in CONFIG_PLACES}
        for name, keys in sections.items()
    }
