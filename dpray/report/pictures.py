"""The report's pictures are SVG in the page's own colours, so that they fit both themes. Those of
the evaluation come from private data, like its numbers."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import numpy as np
from markupsafe import Markup

# matplotlib draws in these colours, and `inline` replaces each by the page's variable.
COLOURS = {
    "#010203": "--ink",
    "#040506": "--muted",
    "#070809": "--accent",
    "#0a0b0c": "--line",
    "#0d0e0f": "--second",
    "#101112": "--third",
    "#131415": "--paper",
}
INK, MUTED, ACCENT, LINE, SECOND, THIRD, PAPER = COLOURS

FILLED: Mapping[str, Any] = {"color": ACCENT, "alpha": 0.45}
OUTLINE: Mapping[str, Any] = {"fill": False, "edgecolor": INK, "linewidth": 1.2}

TERMS_SHOWN = 4

# A picture shows at most this many labels, those with the most test records.
CLASSES_SHOWN = 20

# Up to this many labels leave room for numbers in the cells of a confusion matrix.
_NUMBERED = 10

_LONGEST_LABEL = 24


def iterations_svg(history: Sequence[Mapping[str, Any]]) -> Markup:
    """Draw the concentration of the votes, and the lengths of the kept texts, over the iterations.

    `dpray.methods.aug_pe.release.iteration_history` makes `history`; from votes with noise it is
    post-processing.
    """
    with figure_of_the_page(2.6, columns=2) as (figure, (votes, lengths)):
        steps = [row["iteration"] for row in history]
        shares = [
            float("nan") if row["top_tenth_share"] is None else row["top_tenth_share"]
            for row in history
        ]
        votes.plot(steps, shares, color=ACCENT, marker="o", markersize=4)
        votes.axhline(0.1, color=MUTED, linewidth=0.8, linestyle=":")
        votes.set(title="Votes on the top tenth of the texts", xlabel="iteration", ylim=(0, 1.02))
        middle = [row["words"]["0.5"] for row in history]
        low, high = ([row["words"][q] for row in history] for q in ("0.1", "0.9"))
        lengths.fill_between(steps, low, high, color=ACCENT, alpha=0.2, linewidth=0)
        lengths.plot(steps, middle, color=ACCENT, marker="o", markersize=4)
        lengths.set(title="Words of the kept texts", xlabel="iteration")
        lengths.set_ylim(0, max([*high, 1.0]) * 1.1)
        for axes in (votes, lengths):
            axes.title.set_fontsize(9)
            axes.xaxis.get_major_locator().set_params(integer=True)
        return inline(figure)


def spending_svg(runs: Sequence[Mapping[str, Any]], budget: float, until: str) -> Markup:
    """Draw the epsilon that was spent on a data set over time, and its budget as a dotted line.

    `runs` are the `entries` of `Ledger.show`, each with the time `at` of its reservation and the
    epsilon `spent` after it; `until` is the time at which the picture ends. Times are ISO 8601.
    """
    from matplotlib.dates import ConciseDateFormatter

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
        axes.xaxis.set_major_formatter(ConciseDateFormatter(axes.xaxis.get_major_locator()))
        return inline(figure)


@contextmanager
def figure_of_the_page(
    height: float, columns: int = 1, width: float = 7.4
) -> Iterator[tuple[Any, Any]]:
    """Make a figure in the page's colours, by default as wide as the page, and its axes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "dpray",
        "font.family": "sans-serif",
        "font.size": 9,
        "text.color": INK,
        "axes.edgecolor": LINE,
        "axes.labelcolor": MUTED,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.subplots(1, columns)


def inline(figure: Any) -> Markup:
    """Return the figure as an element of a page, without a header and as wide as there is room."""
    buffer = io.StringIO()
    with warnings.catch_warnings():
        # A warning for each sign that the font lacks would spell private words on stderr.
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"|<svg ', r"<svg \1", svg, count=1)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for colour, variable in COLOURS.items():
        svg = svg.replace(colour, f"var({variable})")
    return Markup(svg)


def lengths_svg(histogram: Mapping[str, Sequence[float]]) -> Markup:
    """Draw the shares of texts by their length in words, real (outline) and synthetic (filled).

    `histogram` is that of `dpray.evaluation.texts`; its last bin holds longer texts too.
    """
    edges = np.array(histogram["edges"])
    with figure_of_the_page(2.4) as (figure, axes):
        axes.stairs(histogram["synthetic"], edges, fill=True, **FILLED)
        axes.stairs(histogram["real"], edges, **OUTLINE)
        axes.set(xlabel="words (longer texts in the last bar)", xlim=(edges[0], edges[-1]))
        _percent(axes.yaxis)
        _legend(axes)
        return inline(figure)


def topics_svg(topics: Sequence[Mapping[str, Any]]) -> Markup:
    """Draw the share of each topic, real (outline) and synthetic (filled), named by its first
    terms. `topics` are those of `dpray.evaluation.topics`."""
    names = [", ".join(topic["terms"][:TERMS_SHOWN]) or "no terms" for topic in topics]
    with figure_of_the_page(0.9 + 0.34 * len(topics)) as (figure, axes):
        _bars(axes, names, *([topic[side] for topic in topics] for side in ("synthetic", "real")))
        _legend(axes)
        return inline(figure)


def _bars(
    axes: Any, names: Sequence[str], synthetic: Sequence[float], real: Sequence[float]
) -> None:
    """Draw two bars at the place of each name, from the top."""
    axes.barh(range(len(names)), synthetic, 0.7, **FILLED)
    axes.barh(range(len(names)), real, 0.7, **OUTLINE)
    # A dollar sign in a text would start a formula.
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.invert_yaxis()
    _percent(axes.xaxis)


def map_svg(points: Mapping[str, Any]) -> Markup:
    """Draw embeddings of real (circles) and synthetic records (dots) along two principal
    components. `points` are those of `dpray.evaluation.fidelity.embedding_map`."""
    with figure_of_the_page(4.6) as (figure, axes):
        real, synthetic = (np.array(points[side]) for side in ("real", "synthetic"))
        axes.scatter(*real.T, s=16, facecolors="none", edgecolors=INK, linewidths=0.6, alpha=0.6)
        axes.scatter(*synthetic.T, s=14, color=ACCENT, alpha=0.6, linewidths=0)
        first, second = points["explained"]
        axes.set(
            xlabel=f"first component ({first:.0%} of the variance)",
            ylabel=f"second ({second:.0%})",
        )
        axes.set_aspect("equal", adjustable="datalim")
        _legend(axes)
        return inline(figure)


def class_accuracy_svg(classes: Mapping[str, Any]) -> Markup:
    """Draw the accuracy on each label's real test records, of a classifier trained on synthetic
    records (filled) and of one trained on real records (outline), with standard deviations.
    `classes` are those of `dpray.evaluation.downstream`."""
    shown = _largest(classes["records"])
    synthetic, ceiling = (
        {key: [classes[side]["accuracy"][i][key] for i in shown] for key in ("mean", "deviation")}
        for side in ("synthetic", "ceiling")
    )
    with figure_of_the_page(0.9 + 0.34 * len(shown)) as (figure, axes):
        _bars(axes, _labels(classes, shown), synthetic["mean"], ceiling["mean"])
        for side, colour, above in ((synthetic, ACCENT, 0.12), (ceiling, INK, -0.12)):
            style = {"xerr": side["deviation"], "fmt": "none", "ecolor": colour, "elinewidth": 1.2}
            axes.errorbar(side["mean"], np.arange(len(shown)) + above, **style)
        axes.set_xlim(0, 1.02)
        _legend(axes, "trained on real (ceiling)", "trained on synthetic")
        return inline(figure)


def confusion_svg(classes: Mapping[str, Any]) -> Markup:
    """Draw the shares of each label's real test records (rows) that were given each label (columns)
    by a classifier trained on synthetic records (left) and one trained on real records (right)."""
    shown = _largest(classes["records"])
    names = _labels(classes, shown)
    # Square matrices as wide as there is room, with their names upright below.
    height = 3.6 + 0.085 * max(map(len, names))
    with figure_of_the_page(height, columns=2) as (figure, both):
        titles = {
            "synthetic": "Trained on synthetic records",
            "ceiling": "Trained on real records (ceiling)",
        }
        for axes, (side, title) in zip(both, titles.items(), strict=True):
            _matrix(axes, np.array(classes[side]["confusion"])[np.ix_(shown, shown)])
            axes.set_title(title, fontsize=9)
            axes.set_xticks(range(len(names)), names, parse_math=False, rotation=90)
            axes.set_yticks(range(len(names)), [""] * len(names))
            axes.tick_params(length=0)
            axes.set_xlabel("answered")
        both[0].set_yticks(range(len(names)), names, parse_math=False)
        both[0].set_ylabel("label")
        return inline(figure)


def confusion_alternative(classes: Mapping[str, Any]) -> str:
    """Put `confusion_svg` into words: how often each label shown was right after training on
    synthetic records, and which label it was most often taken for."""
    shares = np.array(classes["synthetic"]["confusion"])
    found = []
    for place in _largest(classes["records"]):
        words = f"{classes['labels'][place]}: {shares[place, place]:.0%} right"
        others = shares[place].copy()
        others[place] = 0.0
        if others.max() > 0:
            taken_for = classes["labels"][int(others.argmax())]
            words += f", {others.max():.0%} taken for {taken_for}"
        found.append(words)
    return f"Confusion matrices. Trained on synthetic records: {'; '.join(found)}."


def _matrix(axes: Any, shares: np.ndarray) -> None:
    """Draw squares of one colour, more opaque for larger shares, which fits both themes."""
    from matplotlib.patches import Rectangle

    size = len(shares)
    for row, column in np.ndindex(size, size):
        share = float(shares[row, column])
        if share > 0:
            axes.add_patch(
                Rectangle((column - 0.5, row - 0.5), 1, 1, color=ACCENT, alpha=0.75 * share, lw=0)
            )
        if size <= _NUMBERED:
            axes.text(
                column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=8, color=INK
            )
    axes.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5), aspect="equal")


def _largest(records: Sequence[int]) -> list[int]:
    """Return the places of the labels with the most records, in the order of their names."""
    return sorted(np.argsort(-np.array(records), kind="stable")[:CLASSES_SHOWN].tolist())


def _labels(classes: Mapping[str, Any], shown: Sequence[int]) -> list[str]:
    names = (classes["labels"][i] for i in shown)
    return [n if len(n) <= _LONGEST_LABEL else n[: _LONGEST_LABEL - 1] + "…" for n in names]


def _percent(axis: Any) -> None:
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _legend(axes: Any, real: str = "real", synthetic: str = "synthetic") -> None:
    from matplotlib.patches import Patch

    sides = [Patch(**OUTLINE, label=real), Patch(**FILLED, label=synthetic)]
    axes.legend(handles=sides, frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
