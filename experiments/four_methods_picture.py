"""The picture of docs/results.md: what a classifier learns from each method's texts, at the floor
and with private records."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from math import inf, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from four_methods import FLOOR, METHODS, cells
from four_methods_table import real_texts
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from runs import HERE
from sets import labels

PICTURE = HERE.parent / "docs" / "results.svg"


class Panel(NamedTuple):
    data: str
    title: str
    measure: str


PANELS = (
    Panel("agnews", "AG News, accuracy", "accuracy"),
    Panel("yelp", "Yelp, by label", "by_label"),
    Panel("banking77", "BANKING77, by label", "by_label"),
)
"""Plain accuracy is the share of the most frequent label on the sets that are drawn by label."""

CODED = (
    Panel("agnews_coded", "AG News, accuracy", "accuracy"),
    Panel("trec_coded", "TREC, by label", "by_label"),
    Panel("banking77_coded", "a bank's departments, by label", "by_label"),
)
CODED_PICTURE = HERE.parent / "docs" / "results_coded.svg"

MARKS = {FLOOR: "o", 1.0: "v", 4.0: "s", 8.0: "^", inf: "D"}
INK, MUTED, PAPER = "#1f5f99", "#8a8a8a", "#ffffff"
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dpray",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
}


@contextmanager
def picture(file: Path, width: float, height: float) -> Iterator[Figure]:
    """Make a figure of this size in the style of all pictures, and write it to the file."""
    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        figure.savefig(file, metadata={"Date": None}, facecolor=PAPER)


def figures(panel: Panel, method: str) -> dict[float, float]:
    """Return the mean of the panel's measure at each epsilon that was run."""
    found: dict[float, list[float]] = {}
    for cell in cells(panel.data, method):
        if (kept := cell.figures) is not None and (value := kept.get(panel.measure)) is not None:
            found.setdefault(cell.epsilon, []).append(value)
    return {epsilon: float(np.mean(values)) for epsilon, values in sorted(found.items())}


def deviation(panels: Sequence[Panel], methods: Collection[str] = tuple(METHODS)) -> float:
    """Return the standard deviation of one run's figure, pooled over the cells with more runs."""
    squares, freedom = 0.0, 0
    for panel, method in product(panels, methods):
        runs: dict[float, list[float]] = {}
        for cell in cells(panel.data, method):
            if (kept := cell.figures) is not None and (value := kept[panel.measure]) is not None:
                runs.setdefault(cell.epsilon, []).append(value)
        for values in runs.values():
            squares += float(np.var(values)) * len(values)
            freedom += len(values) - 1
    return sqrt(squares / freedom)


def draw(panels: Sequence[Panel], file: Path) -> None:
    """Write the picture: a row for each method, a line from the lowest to the highest figure."""
    rows = [name for name in METHODS if any(figures(panel, name) for panel in panels)]
    with picture(file, 9.5, 0.32 * len(rows) + 1.3) as figure:
        for panel, axes in zip(panels, figure.subplots(1, len(panels), sharey=True), strict=True):
            draw_panel(panel, axes, rows)
        figure.axes[0].set_yticks(range(len(rows)), [METHODS[name] for name in rows])
        figure.axes[0].invert_yaxis()
        drawn = {e for panel in panels for name in rows for e in figures(panel, name)}
        figure.legend(handles=legend(drawn), loc="outside lower center", ncols=7, frameon=False)


def draw_panel(panel: Panel, axes: Axes, rows: Sequence[str]) -> None:
    real = [found[panel.measure] for found in real_texts(panel.data)["private"]]
    axes.axvspan(min(real), max(real), color=MUTED, alpha=0.25, linewidth=0)
    axes.axvline(1 / len(labels(panel.data)), color=MUTED, linestyle=(0, (1, 2)))
    for place, name in enumerate(rows):
        found = figures(panel, name)
        if found:
            axes.hlines(place, min(found.values()), max(found.values()), color=MUTED, linewidth=1)
        for epsilon, value in found.items():
            axes.plot(value, place, **look(epsilon))
    axes.set_title(panel.title, fontsize=9)
    axes.set_xlim(0, None)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color=MUTED, alpha=0.2)


def look(epsilon: float) -> dict[str, Any]:
    """Return how a point is drawn: the floor is hollow."""
    fill = PAPER if epsilon == FLOOR else INK
    return {
        "marker": MARKS[epsilon],
        "color": INK,
        "markerfacecolor": fill,
        "markersize": 5,
        "linestyle": "none",
    }


def legend(epsilons: Collection[float]) -> list[Line2D]:
    drawn = [
        Line2D([], [], label="floor" if e == FLOOR else f"eps {e:g}", **look(e))
        for e in MARKS
        if e in epsilons
    ]
    real = Line2D([], [], color=MUTED, alpha=0.4, linewidth=7, label="80 real records")
    guess = Line2D([], [], color=MUTED, linestyle=(0, (1, 2)), label="a guess")
    return [*drawn, real, guess]


def section() -> list[str]:
    """Draw the picture; return the section that shows it."""
    draw(PANELS, PICTURE)
    return [
        "## With public texts of the kind",
        "",
        "![The accuracy of classifiers by method and epsilon](results.svg)",
        "",
        "As in the first section, but the labels have their names, and prompts show public texts "
        "of the label. If DP-SGD begins with public records, its floor is what only these teach "
        "(`python experiments/four_methods.py agnews yelp banking77`).",
    ]


def coded_section() -> list[str]:
    """Draw the picture; return the section that shows it."""
    draw(CODED, CODED_PICTURE)
    return [
        "## Labels that only private records explain",
        "",
        "![The accuracy of classifiers by method, without and with private records]"
        "(results_coded.svg)",
        "",
        f"`python experiments/four_methods.py {' '.join(panel.data for panel in CODED)}` makes "
        "these runs. The labels are codes (A, B, ...), and a prompt says only what kind of text "
        'the records are, such as "a short news report". Prompts show no public text of the kind. '
        "The shares of the labels are public. Aug-PE's prompts also draw from a list of 41 "
        "everyday subjects, which is the same for all sets and covers their topics. The other "
        "methods have no such list. Aug-PE's votes also use the embedder that the score uses. "
        "Each mark is what a classifier learned from a run's texts, the mean of its runs. The "
        f"floor (hollow) is the same method at epsilon {FLOOR:g}, where next to nothing of the "
        "private texts comes through. For DP-SGD it is the model before its training. Anything to "
        "the right of the floor was learned from the private records, or is luck. The band is "
        'what 80 real records teach, over some draws of them. "By label" is the mean of the '
        "labels' accuracies.",
        "",
        f"The standard deviation of one run is {deviation(CODED):.3f} over all pairs of runs, and "
        "so is that of a difference of two means. Gains of less than twice that say nothing.",
    ]
