"""The page of a rehearsal: the scores of every method on public records at each epsilon."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpray.io.files import write_durably
from dpray.report.curves import Point, curves_svg, key_svg, row
from dpray.report.page import templates


def write_rehearsal(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write `rehearsal.json` and `rehearsal.html` into the folder; `summary` is that of a
    `Rehearsal`."""
    write_durably(folder / "rehearsal.json", json.dumps(summary, indent=2) + "\n")
    write_durably(folder / "rehearsal.html", render_rehearsal(summary))


def render_rehearsal(summary: Mapping[str, Any]) -> str:
    """Return one HTML page that needs no network and no script."""
    names = list(summary["epsilons"][0]["methods"])
    curves: dict[str, list[Point]] = {name: [] for name in names}
    for tried in summary["epsilons"]:
        epsilon = tried["epsilon"]
        for name, method in tried["methods"].items():
            if method["scores"] is not None:
                score = method["scores"][summary["score"]]
                point = Point(epsilon, score["mean"], row(name, epsilon), score["deviation"])
                curves[name].append(point)
    real = summary["real_records"][summary["score"]]["mean"]
    picture = None
    if any(curves.values()):
        picture = curves_svg(curves, line=real, from_zero=False, height=3.0, width=7.4)
    page = templates().get_template("rehearsal.html.j2")
    return page.render(**summary, names=names, picture=picture, key=key_svg, row=row)
