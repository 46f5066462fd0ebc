"""The page of a rehearsal says which method did best on public records at each epsilon."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpray.io.files import write_durably
from dpray.report import pictures
from dpray.report.page import templates


def write_rehearsal(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write `rehearsal.json` and `rehearsal.html` into the folder; `summary` is that of a
    `Rehearsal`."""
    write_durably(folder / "rehearsal.json", json.dumps(summary, indent=2) + "\n")
    write_durably(folder / "rehearsal.html", render_rehearsal(summary))


def render_rehearsal(summary: Mapping[str, Any]) -> str:
    """Return one HTML page that needs no network and no script."""
    measure = summary["score"]
    curves: defaultdict[str, list[tuple[float, Mapping[str, float]]]] = defaultdict(list)
    for tried in summary["epsilons"]:
        for name, method in tried["methods"].items():
            if method["scores"] is not None:
                curves[name].append((tried["epsilon"], method["scores"][measure]))
    page = templates().get_template("rehearsal.html.j2")
    return page.render(**summary, curves=curves, pictures=pictures)
