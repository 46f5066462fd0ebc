"""The pictures of the pages are SVG in the page's own colours, so that they fit both themes."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from importlib import resources
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from dpray.extras import Late
from dpray.runs.privacy_report import Iteration
from dpray.types import ReadOnlyJson

if TYPE_CHECKING:
    import matplotlib
    from matplotlib import dates, ticker
    from matplotlib import figure as figures
else:  # Most commands draw nothing.
    matplotlib, figures = Late("matplotlib"), Late("matplotlib.figure")
    dates, ticker = Late("matplotlib.dates"), Late("matplotlib.ticker")

# matplotlib draws in these colours, and `inline` replaces each by the page's variable.
COLOURS = {
    "#010203": "--ink",
    "#040506": "--muted",
    "#070809": "--accent",
    "#0a0b0c": "--line",
    "#0d0e0f": "--second",
    "#101112": "--third",
}
INK, MUTED, ACCENT, LINE, SECOND, THIRD = COLOURS


LOOKS = [*zip("os^Dvphd", 2 * (ACCENT, SECOND, THIRD, INK), strict=True)]
"""The marks and colours of curves, in the order of use."""


def iterations_svg(history: Sequence[Iteration]) -> Markup:
    """Draw the concentration of the votes, and the lengths of the kept texts, over the iterations.

    `dpray.methods.aug_pe.release.iteration_history` makes each entry of `history` from noisy votes.
    """
    with figure_of_the_page(2.6, columns=2) as (figure, (votes, lengths)):
        steps = [row.iteration for row in history]
        shares = [row.top_tenth_share for row in history]
        votes.plot(steps, shares, color=ACCENT, marker="o", markersize=4)
        votes.axhline(0.1, color=MUTED, linewidth=0.8, linestyle=":")
        votes.set(title="Votes on the top tenth of the texts", xlabel="iteration", ylim=(0, 1.02))
        middle = [row.words["0.5"] for row in history]
        low, high = ([row.words[q] for row in history] for q in ("0.1", "0.9"))
        lengths.fill_between(steps, low, high, color=ACCENT, alpha=0.2, linewidth=0)
        lengths.plot(steps, middle, color=ACCENT, marker="o", markersize=4)
        lengths.set(title="Words of the kept texts", xlabel="iteration")
        lengths.set_ylim(0, max([*high, 1.0]) * 1.1)
        for axes in (votes, lengths):
            axes.xaxis.get_major_locator().set_params(integer=True)
        return inline(figure)


def spending_svg(runs: Sequence[ReadOnlyJson], budget: float, until: str) -> Markup:
    """Draw the epsilon that was spent on a data set over time, and its budget as a dotted line.

    `runs` are the `entries` of `Ledger.show`, each with the time `at` of its reservation and the
    epsilon `spent` after it. The picture ends at `until`. Times are in ISO 8601.
    """
    times = [datetime.fromisoformat(time) for time in (*(run["at"] for run in runs), until)]
    spent = [run["spent"] for run in runs]
    with figure_of_the_page(2.2) as (figure, axes):
        steps = [0.0, *spent, spent[-1]]
        axes.step([times[0], *times], steps, where="post", color=ACCENT)
        axes.fill_between([times[0], *times], steps, step="post", color=ACCENT, alpha=0.2)
        axes.axhline(budget, color=MUTED, linewidth=0.8, linestyle=":")
        axes.set(ylabel="epsilon spent", ylim=(0, 1.08 * max(budget, spent[-1])))
        # A single moment has no width to draw.
        span = max(times[-1] - times[0], timedelta(minutes=1))
        axes.set_xlim(times[0] - span / 50, times[0] + span)
        axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(axes.xaxis.get_major_locator()))
        return inline(figure)


def curves_svg(curves: Mapping[str, Sequence[tuple[float, float, float]]], line: float) -> Markup:
    """Draw a curve a method through (epsilon, mean, deviation), dotted what real records have."""
    with figure_of_the_page(3.2) as (figure, axes):
        for (name, points), (mark, colour) in zip(curves.items(), cycle(LOOKS), strict=False):
            line_of = {"label": name, "fmt": f"-{mark}", "color": colour, "capsize": 2.5}
            axes.errorbar(*zip(*points, strict=True), **line_of)
        axes.axhline(line, color=MUTED, linestyle=":", label="real records")
        tried = sorted({point[0] for points in curves.values() for point in points})
        axes.set(xscale="log", xlabel="epsilon")
        axes.set_xticks(tried, [f"{epsilon:g}" for epsilon in tried])
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.grid(axis="y", color=LINE, linewidth=0.6)
        figure.legend(loc="outside upper center", ncols=4, frameon=False)
        return inline(figure)


def accuracy_svg(downstream: ReadOnlyJson) -> Markup:
    """Draw the accuracy of the classifiers trained on the floor, on synthetic records and on real
    records (the ceiling), with bars of one standard deviation. `downstream` is that part of
    `evaluation.json`."""
    names = ("floor", "synthetic", "ceiling")
    with figure_of_the_page(1.5) as (figure, axes):
        for row, name in enumerate(names):
            found, colour = downstream[name]["accuracy"], ACCENT if name == "synthetic" else INK
            axes.errorbar(found["mean"], row, xerr=found["deviation"], fmt="o", color=colour)
        axes.set_yticks(range(len(names)), names)
        axes.set(xlabel="accuracy on real test records", xlim=(0, 1), ylim=(-0.5, 2.5))
        return inline(figure)


def canaries_svg(secrets: Sequence[ReadOnlyJson]) -> Markup:
    """Draw the perplexities of each kind of canary among those of its look-alikes (Yue et al. 2023,
    Figure 4). `secrets` are the entries of `dpray.evaluation.canaries.try_canaries` for a model.
    """
    kinds = list(dict.fromkeys(secret["kind"] for secret in secrets))
    repetitions = sorted({secret["repetitions"] for secret in secrets})
    with figure_of_the_page(2.2, columns=len(kinds)) as (figure, places):
        for kind, axes in zip(kinds, places, strict=True):
            for secret in (secret for secret in secrets if secret["kind"] == kind):
                others = secret["look_alikes"]
                axes.plot(others, np.linspace(0, 1, len(others)), color=MUTED, linewidth=0.8)
                mark, colour = LOOKS[repetitions.index(secret["repetitions"])]
                share = (secret["rank"] - 1) / (secret["candidates"] - 1)
                label = f"put in {secret['repetitions']} times"
                axes.plot(secret["perplexity"], share, mark, color=colour, label=label, zorder=3)
            axes.set(title=kind, xlabel="perplexity", ylim=(-0.05, 1.05))
        places[0].set_ylabel("share of look-alikes below")
        marks, labels = places[0].get_legend_handles_labels()
        figure.legend(marks, labels, loc="outside upper center", ncols=len(marks), frameon=False)
        return inline(figure)


@contextmanager
def figure_of_the_page(height: float, columns: int = 1) -> Iterator[tuple[figures.Figure, Any]]:
    """Make a figure as wide as the page and in its colours, and its axes."""
    style: Any = {
        "svg.fonttype": "none", "svg.hashsalt": "dpray",
        "font.family": "sans-serif", "font.size": 9, "axes.titlesize": 9, "text.color": INK,
        "axes.edgecolor": LINE, "axes.labelcolor": MUTED,
        "axes.spines.top": False, "axes.spines.right": False,
        "xtick.color": MUTED, "ytick.color": MUTED,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        figure = figures.Figure(figsize=(7.4, height), layout="constrained")
        yield figure, figure.subplots(1, columns)


def inline(figure: figures.Figure) -> Markup:
    """Return the figure as an SVG element that fills the width of the page."""
    buffer = io.StringIO()
    with warnings.catch_warnings():
        # matplotlib warns of each character that the font lacks, which would spell names on stderr.
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue().partition("<svg")[2]
    svg = "<svg" + re.sub(r' width="[^"]*" height="[^"]*"', "", svg, count=1)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for colour, variable in COLOURS.items():
        svg = svg.replace(colour, f"var({variable})")
    return Markup(svg)


def standalone(svg: Markup) -> str:
    """Return a picture of a page as a file of its own, in the page's colours on light paper."""
    css = resources.files("dpray.report").joinpath("templates/report.css.j2").read_text("utf-8")
    colours = re.findall(r"--[\w-]+: #\w+", css.partition("}")[0])
    style = "; ".join([*colours, "background: var(--paper)"])
    return str(svg).replace("<svg ", f'<svg style="{style}" ', 1) + "\n"
