"""The page of a comparison: the plan of every method at each epsilon, from public numbers, and its
score in a rehearsal if there was one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jinja2 import UndefinedError

from dpray.io.files import read_json
from dpray.report.curves import Point, curves_svg, key_svg, row
from dpray.report.figures import number
from dpray.report.page import templates
from dpray.types import InputError

Methods = Mapping[str, Mapping[str, Any]]
"""The methods' summaries at one epsilon, by their names."""


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
    scores = {} if rehearsal is None else _scores(rehearsal)
    shown = {name: parameters([at["methods"][name] for at in tried]) for name in names}

    def about(name: str, epsilon: float, method: Mapping[str, Any]) -> str:
        return _about(name, epsilon, method, shown[name], scores.get((name, epsilon)))

    def curve(name: str, value: Callable[[Mapping[str, Any]], float | None]) -> Iterator[Point]:
        for at in tried:
            method, epsilon = at["methods"][name], at["epsilon"]
            found = value(method)
            if found is not None:
                said = about(name, epsilon, method)
                yield Point(epsilon, found, said, row(name, epsilon), state=state(method))

    def panel(picture: str, value: Callable[[Mapping[str, Any]], float | None], **look: Any) -> Any:
        curves = {name: list(curve(name, value)) for name in names}
        return curves_svg(curves, picture, **look) if any(curves.values()) else None

    panels = {
        "signal": panel("signal", _signal, line=1.0, linear_to=0.1),
        "records": panel("records", _records, line=explored["records_wanted"]),
        "calls": panel("calls", _calls, linear_to=100.0),
        "quality": None,
    }
    if rehearsal is not None:
        panels["quality"] = _quality(rehearsal, explored, names, about)
    page = templates().get_template("comparison.html.j2")
    try:
        return page.render(
            **explored, rehearsal=rehearsal, scores=scores, names=names, panels=panels,
            shown=shown, row=row, state=state, key=key_svg, settings=settings,
            rehearsed_best=_best(rehearsal or {"epsilons": []}, tried),
            differs=lambda name, at: _differs(name, at, scores),
        )  # fmt: skip
    except (UndefinedError, KeyError, TypeError) as error:
        raise InputError(f"--rehearsal: written by another version of dpray ({error})") from None


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
    if method["name"] != "chain":
        return method
    return {f"{one['name']} {key}": one[key] for one in method["methods"] for key in one}


def _about(
    name: str,
    epsilon: float,
    method: Mapping[str, Any],
    shown: list[str],
    score: Mapping[str, Any] | None,
) -> str:
    lines = [f"{name} at ε {epsilon:g}"]
    if not method["feasible"]:
        lines.append(f"no plan: {method['why_not']}")
        if method["needs_records"] is not None:
            lines.append(f"enough from {method['needs_records']:,} records on")
        return "\n".join(lines)
    plan, signal = method["plan"], method["signal"]
    lines += method["reasons"]
    of_plan = settings(plan)
    lines.append(", ".join(f"{key} {_value(of_plan[key])}" for key in shown if key in of_plan))
    if signal is not None:
        lines.append(
            f"signal {signal['value']:,.3g}, enough from {signal['enough']:g} on: "
            f"{signal['meaning']}"
        )
    if method["needs_records"] is not None:
        lines.append(f"enough from {method['needs_records']:,} records on")
    lines.append(f"{plan['records']:,} texts, {plan['llm_calls']:,} calls of the language model")
    if score is not None:
        lines.append(f"in the rehearsal {score['mean']:.3f} ± {score['deviation']:.3f}")
    return "\n".join(lines)


def _value(value: Any) -> str:
    return number(value) if isinstance(value, int | float) else str(value)


def _signal(method: Mapping[str, Any]) -> float | None:
    if not method["feasible"] or method["signal"] is None:
        return None
    return float(method["signal"]["value"] / method["signal"]["enough"])


def _records(method: Mapping[str, Any]) -> float:
    return method["plan"]["records"] if method["feasible"] else 0


def _calls(method: Mapping[str, Any]) -> float | None:
    return method["plan"]["llm_calls"] if method["feasible"] else None


def _scores(rehearsal: Mapping[str, Any]) -> dict[tuple[str, float], Mapping[str, Any]]:
    """Return mean and deviation of the score that decides, with the settings that were rehearsed,
    by method and epsilon."""
    return {
        (name, tried["epsilon"]): method["scores"][rehearsal["score"]]
        | {"method": method["plan"]["method"]}
        for tried in rehearsal["epsilons"]
        for name, method in tried["methods"].items()
        if method["scores"] is not None
    }


def _best(rehearsal: Mapping[str, Any], tried: list[Mapping[str, Any]]) -> dict[float, str]:
    """Return the best method of the rehearsal for every epsilon of the page, or "" if there was
    none."""
    best = {at["epsilon"]: at["best"] for at in rehearsal["epsilons"]}
    return {at["epsilon"]: best.get(at["epsilon"]) or "" for at in tried}


def _differs(name: str, at: Mapping[str, Any], scores: Mapping[tuple[str, float], Any]) -> bool:
    """Return whether the rehearsal of a method had other settings than its plan has now."""
    method, score = at["methods"][name], scores.get((name, at["epsilon"]))
    return score is not None and method["feasible"] and score["method"] != method["plan"]["method"]


def _quality(
    rehearsal: Mapping[str, Any],
    explored: Mapping[str, Any],
    names: list[str],
    about: Callable[[str, float, Mapping[str, Any]], str],
) -> Any:
    """Draw the rehearsal's scores at the epsilons of the page."""
    compared = {at["epsilon"]: at["methods"] for at in explored["epsilons"]}
    scores = _scores(rehearsal)
    curves = {
        name: [
            Point(
                epsilon,
                scores[name, epsilon]["mean"],
                about(name, epsilon, methods[name]),
                row(name, epsilon),
                scores[name, epsilon]["deviation"],
                state(methods[name]),
            )
            for epsilon, methods in compared.items()
            if (name, epsilon) in scores
        ]
        for name in names
    }
    real = rehearsal["real_records"][rehearsal["score"]]["mean"]
    return (
        curves_svg(curves, "quality", line=real, from_zero=False) if any(curves.values()) else None
    )
