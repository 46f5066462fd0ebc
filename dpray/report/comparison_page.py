"""The pages of the methods over epsilon: a comparison of their plans, from public numbers alone,
and the scores of a rehearsal."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import UndefinedError
from markupsafe import Markup

from dpray.io.files import read_json, write_durably
from dpray.report.curves import Point, curves_svg, key_svg, row
from dpray.report.page import templates
from dpray.types import InputError

Scores = Mapping[tuple[str, float], Mapping[str, Any]]
"""Mean and deviation of the score that decides, and the settings that were rehearsed, by method and
epsilon."""

Value = Callable[[str, Mapping[str, Any]], float | None]
"""Returns the value of the named method at one epsilon, or None without one."""


def read_rehearsal(folder: Path) -> dict[str, Any]:
    """Read the figures of a rehearsal from its folder. Raises InputError without them."""
    found = read_json(folder / "rehearsal.json", "--rehearsal")
    try:
        scored_epsilons(found)
    except (KeyError, TypeError, AttributeError):
        raise InputError("--rehearsal: rehearsal.json: not as dpray writes it") from None
    return found


def scored_epsilons(rehearsal: Mapping[str, Any]) -> list[float]:
    """Return the epsilons at which methods were rehearsed."""
    score, real = rehearsal["score"], rehearsal["real_records"]
    float(real[score]["mean"])
    return [
        float(tried["epsilon"])
        for tried in rehearsal["epsilons"]
        if any(method["scores"] for method in tried["methods"].values())
    ]


def render_comparison(explored: Mapping[str, Any], rehearsal: Mapping[str, Any] | None) -> str:
    """Return one HTML page that needs no network and no script. `explored` is the object that
    `dpray plan --compare --html --json` prints, and `rehearsal` the content of `rehearsal.json`."""
    tried = explored["epsilons"]
    names = list(tried[0]["methods"])
    scores: Scores = {} if rehearsal is None else _scores(rehearsal)
    best = {} if rehearsal is None else {at["epsilon"]: at["best"] for at in rehearsal["epsilons"]}
    shown = {name: parameters([at["methods"][name] for at in tried]) for name in names}
    page = templates().get_template("comparison.html.j2")
    try:
        return page.render(
            **explored,
            rehearsal=rehearsal,
            scores=scores,
            names=names,
            panels=_panels(explored, rehearsal, scores),
            shown=shown,
            row=row,
            state=state,
            key=key_svg,
            settings=settings,
            rehearsed_best=best,
            differs=lambda name, at: _differs(name, at, scores),
        )
    except (UndefinedError, KeyError, TypeError) as error:
        raise InputError(f"--rehearsal: written by another version of dpray ({error})") from None


def _panels(
    explored: Mapping[str, Any], rehearsal: Mapping[str, Any] | None, scores: Scores
) -> dict[str, Markup | None]:
    """Draw each picture of the comparison; None without a point in it."""
    tried = explored["epsilons"]

    def panel(value: Value, **look: Any) -> Markup | None:
        curves: dict[str, list[Point]] = {name: [] for name in tried[0]["methods"]}
        for at in tried:
            epsilon = at["epsilon"]
            for name, method in at["methods"].items():
                found = value(name, at)
                if found is not None:
                    spread = scores[name, epsilon]["deviation"] if value is score else 0.0
                    point = Point(epsilon, found, row(name, epsilon), spread, state(method))
                    curves[name].append(point)
        return curves_svg(curves, **look) if any(curves.values()) else None

    def score(name: str, at: Mapping[str, Any]) -> float | None:
        found = scores.get((name, at["epsilon"]))
        return None if found is None else found["mean"]

    def signal(name: str, at: Mapping[str, Any]) -> float | None:
        method = at["methods"][name]
        if not method["feasible"] or method["signal"] is None:
            return None
        return float(method["signal"]["value"] / method["signal"]["enough"])

    def records(name: str, at: Mapping[str, Any]) -> float:
        method = at["methods"][name]
        return method["plan"]["records"] if method["feasible"] else 0

    def calls(name: str, at: Mapping[str, Any]) -> float | None:
        method = at["methods"][name]
        return method["plan"]["llm_calls"] if method["feasible"] else None

    real = rehearsal and rehearsal["real_records"][rehearsal["score"]]["mean"]
    return {
        "quality": panel(score, line=real, from_zero=False),
        "signal": panel(signal, line=1.0, linear_to=0.1),
        "records": panel(records, line=explored["records_wanted"]),
        "calls": panel(calls, linear_to=100.0),
    }


def state(method: Mapping[str, Any]) -> Any:
    if not method["feasible"]:
        return "none"
    return "enough" if method["signal"] is None or method["signal"]["is_enough"] else "below"


def parameters(over_epsilon: list[Mapping[str, Any]]) -> list[str]:
    """Return the names of a method's parameters that differ between epsilons, or of all parameters
    if none does."""
    plans = [settings(method["plan"]) for method in over_epsilon if method["feasible"]]
    names = [
        name
        for name, value in (plans[0].items() if plans else ())
        if isinstance(value, int | float | str) and name.split()[-1] != "name"
    ]
    changed = [name for name in names if len({repr(plan.get(name)) for plan in plans}) > 1]
    return changed or names


def settings(plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters of a plan; in a chain the method's name stands before each."""
    method = plan["method"]
    if method["name"] == "chain":
        return {f"{one['name']} {key}": one[key] for one in method["methods"] for key in one}
    return dict(method)


def _scores(rehearsal: Mapping[str, Any]) -> Scores:
    return {
        (name, tried["epsilon"]): method["scores"][rehearsal["score"]]
        | {"method": method["plan"]["method"]}
        for tried in rehearsal["epsilons"]
        for name, method in tried["methods"].items()
        if method["scores"] is not None
    }


def _differs(name: str, at: Mapping[str, Any], scores: Scores) -> bool:
    """Return whether the rehearsal of a method had other settings than its plan has now."""
    method, score = at["methods"][name], scores.get((name, at["epsilon"]))
    return score is not None and method["feasible"] and score["method"] != method["plan"]["method"]


def write_rehearsal(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write `rehearsal.json` and `rehearsal.html` into the folder; `summary` is that of a
    `Rehearsal`."""
    write_durably(folder / "rehearsal.json", json.dumps(summary, indent=2) + "\n")
    write_durably(folder / "rehearsal.html", render_rehearsal(summary))


def render_rehearsal(summary: Mapping[str, Any]) -> str:
    """Return one HTML page that needs no network and no script."""
    scores = _scores(summary)
    names = list(summary["epsilons"][0]["methods"])
    curves: dict[str, list[Point]] = {name: [] for name in names}
    for (name, epsilon), score in scores.items():
        point = Point(epsilon, score["mean"], row(name, epsilon), score["deviation"])
        curves[name].append(point)
    real = summary["real_records"][summary["score"]]["mean"]
    picture = None
    if scores:
        picture = curves_svg(curves, line=real, from_zero=False, height=3.0, width=7.4)
    page = templates().get_template("rehearsal.html.j2")
    return page.render(**summary, names=names, picture=picture, key=key_svg, row=row)
