"""The picture and the section of docs/results.md on how much more records help."""

from __future__ import annotations

from typing import Any

import numpy as np
from four_methods_picture import INK, MUTED, PAPER, STYLE
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from runs import HERE
from sizes import BATCH, EPSILONS, FLOOR, LARGER, METHODS, SIZES, STEPS, TESTS, TEXTS, Cell, cells

PICTURE = HERE.parent / "docs" / "results_sizes.svg"
MEASURES = {"accuracy": "accuracy", "distance": "distance, less is better"}
LOOKS = {
    "private_prediction": (INK, "o"),
    "aug_pe": ("#b5651d", "s"),
    "dp_kps": ("#6a3d9a", "^"),
    "dp_sgd": ("#2e7d32", "D"),
    "dp_sgd_larger": ("#2e7d32", "P"),
}


def values(cell: Cell, measure: str) -> list[float]:
    """Return the figure of each run of a cell."""
    found = [c.figures for c in cells(cell.method) if c._replace(number=0) == cell]
    return [value for each in found if each and (value := each[measure]) is not None]


def draw() -> None:
    with rc_context(STYLE):
        figure = Figure(figsize=(9.5, 3.6), layout="constrained")
        panels = figure.subplots(1, len(MEASURES) * len(EPSILONS))
        for left, right in (panels[:2], panels[2:]):
            right.sharey(left)
        for i, measure in enumerate(MEASURES):
            for j, epsilon in enumerate(EPSILONS):
                panel(panels[i * len(EPSILONS) + j], measure, epsilon)
        handles = [
            Line2D([], [], color=c, marker=m, markersize=5, label=METHODS[name])
            for name, (c, m) in LOOKS.items()
            if any(cell.figures for cell in cells(name))
        ]
        handles.append(
            Line2D([], [], color=MUTED, marker="o", markerfacecolor=PAPER, label="floor, left")
        )
        figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False)
        figure.savefig(PICTURE, metadata={"Date": None}, facecolor=PAPER)


def panel(axes: Axes, measure: str, epsilon: float) -> None:
    for method, (color, marker) in LOOKS.items():
        look: dict[str, Any] = {"color": color, "marker": marker, "markersize": 4}
        runs = {n: values(Cell(method, epsilon, n, 0), measure) for n in SIZES}
        shown = {n: found for n, found in runs.items() if found}
        axes.plot([*shown], [np.mean(found) for found in shown.values()], linewidth=1, **look)
        for n, found in shown.items():
            axes.vlines(n, min(found), max(found), color=color, linewidth=1)
        floor = values(Cell(method, FLOOR, SIZES[0], 0), measure)
        if floor:
            axes.plot(SIZES[0] / 3, np.mean(floor), **look | {"markerfacecolor": PAPER})
    if measure == "accuracy":
        axes.axhline(0.5, color=MUTED, linestyle=(0, (1, 2)))
    axes.set_xscale("log")
    axes.set_xticks(SIZES, [f"{n // 1000}k" for n in SIZES])
    axes.minorticks_off()
    axes.margins(x=0.15)
    axes.set_title(f"{MEASURES[measure]}, eps {epsilon:g}", fontsize=9)
    axes.grid(axis="y", color=MUTED, alpha=0.2)


def section() -> list[str]:
    """Draw the picture; return the section that shows it."""
    draw()
    return [
        "## More records",
        "",
        "![Accuracy and distance of the four methods over the number of records]"
        "(results_sizes.svg)",
        "",
        f"`python experiments/sizes.py`: {TEXTS} texts of {SIZES[0]:,} to {SIZES[-1]:,} notes of "
        "the packaged clinic, with the packaged model, which has read notes of others. The test "
        f"is {TESTS:,} other notes of the private one. DP-SGD takes {STEPS} steps of {BATCH} notes "
        f"for every size, an equal amount of work; with larger batches, {LARGER:,}. Dots: a "
        f"guess. Floor: epsilon {FLOOR:g}, and for DP-SGD the model before its training.",
    ]
