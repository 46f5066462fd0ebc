"""The ablations of Xie et al. (2024) at a small size: rank against probability, the number of
variations L, lookahead K and of votes T, each alone, for docs/results.md.

`python experiments/aug_pe_ablations.py [WAY[#RUN]]...` makes the runs that are not there yet: 100
texts about AG News with codes for labels, at epsilon 1, as four_methods.py has them, whose runs are
the base. Their figures are kept in experiments/measured/aug_pe_ablations.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from figures import Figures, Yardstick, rounded
from four_methods import Cell, changes, make_once
from four_methods_picture import INK, MUTED, PAPER, STYLE
from matplotlib import rc_context
from matplotlib.figure import Figure
from runs import HERE, RUNS, left, released

DATA, EPSILON, RUNS_OF_EACH = "agnews_coded", 1.0, 2
BASE = "base"


class Way(NamedTuple):
    title: str
    keys: Sequence[str] = ()
    votes: int = 4


WAYS = {
    BASE: Way("rank, L 2, K 0, T 4"),
    "probability": Way("selection by probability (PE)", ("method.selection=probability",)),
    "original": Way(
        "L 1, by probability (the original PE)",
        ("method.variations=1", "method.selection=probability"),
    ),
    "variations_4": Way("L 4", ("method.variations=4",)),
    "lookahead_2": Way("K 2", ("method.lookahead=2",)),
    "votes_1": Way("T 1", ("method.iterations=1",), votes=1),
    "votes_2": Way("T 2", ("method.iterations=2",), votes=2),
    "votes_8": Way("T 8", ("method.iterations=8",), votes=8),
}
KEPT = HERE / "measured" / "aug_pe_ablations"
PICTURE = HERE.parent / "docs" / "results_aug_pe_votes.svg"


def base(number: int) -> Cell:
    return Cell(DATA, "aug_pe", EPSILON, number)


def kept(name: str, number: int) -> Path:
    return KEPT / f"{name}-{number}.json"


def figures(name: str) -> list[Figures]:
    """Return the figures of each run of a way."""
    if name == BASE:
        return [found for n in range(RUNS_OF_EACH) if (found := base(n).figures)]
    files = [kept(name, n) for n in range(RUNS_OF_EACH)]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def measure(name: str, number: int) -> None:
    out = RUNS / "aug_pe_ablations" / f"{name}-{number}"
    settings = [*changes(base(number)), *WAYS[name].keys]
    minutes = make_once("smollm2/aug_pe", out, EPSILON, settings)
    found = Yardstick(DATA).of_release(released(out)) | {"cpu_minutes": minutes}
    KEPT.mkdir(parents=True, exist_ok=True)
    kept(name, number).write_text(json.dumps(rounded(found), indent=1) + "\n")
    print(name, number, rounded(found), flush=True)


def draw() -> None:
    """Draw the accuracy over T."""
    over = sorted(
        (way.votes, name) for name, way in WAYS.items() if name == BASE or "votes" in name
    )
    with rc_context(STYLE):
        figure = Figure(figsize=(4.5, 3.2), layout="constrained")
        axes = figure.subplots()
        found = {T: [float(run["accuracy"] or 0) for run in figures(name)] for T, name in over}
        found = {T: runs for T, runs in found.items() if runs}
        axes.plot([*found], [np.mean(runs) for runs in found.values()], color=INK, marker="o")
        for T, runs in found.items():
            axes.vlines(T, min(runs), max(runs), color=INK, linewidth=1)
        axes.axhline(0.25, color=MUTED, linestyle=(0, (1, 2)))
        axes.set_xscale("log", base=2)
        axes.set_xticks([*found], [str(T) for T in found])
        axes.set_xlabel("votes, T")
        axes.set_title("AG News, codes for labels, eps 1: accuracy", fontsize=9)
        axes.grid(axis="y", color=MUTED, alpha=0.2)
        figure.savefig(PICTURE, metadata={"Date": None}, facecolor=PAPER)


def section() -> list[str]:
    """Draw the picture; return the section that shows it."""
    draw()
    lines = [
        "## Aug-PE, one key at a time",
        "",
        "![Accuracy of Aug-PE's texts over the number of votes](results_aug_pe_votes.svg)",
        "",
        "`python experiments/aug_pe_ablations.py` makes 100 texts of SmolLM2-135M about AG News "
        f"with codes for labels, at epsilon {EPSILON:g}. Each row differs from the first in the "
        "keys that it names, and has the noise of its T. Each run has a figure. Dots are a guess.",
        "",
        "| way | accuracy | distance | CPU minutes |",
        "|---|---|---|---|",
    ]
    for name, way in WAYS.items():
        if runs := figures(name):
            cells = (
                ", ".join("" if run[key] is None else f"{run[key]:{form}}" for run in runs)
                for key, form in (("accuracy", ".2f"), ("distance", ".2f"), ("cpu_minutes", ".1f"))
            )
            lines.append(f"| {way.title} | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    for name, number in left(
        sys.argv[1:], [name for name in WAYS if name != BASE], RUNS_OF_EACH, kept
    ):
        measure(name, number)
