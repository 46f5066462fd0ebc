"""The pictures of the report's evaluation come from private data, like its numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from dpray.report.pictures import ACCENT, INK, figure_of_the_page, inline

FILLED: Mapping[str, Any] = {"color": ACCENT, "alpha": 0.45}
OUTLINE: Mapping[str, Any] = {"fill": False, "edgecolor": INK, "linewidth": 1.2}

TERMS_SHOWN = 4

# A picture shows at most this many labels, those with the most test records.
CLASSES_SHOWN = 20

# Up to this many labels leave room for numbers in the cells of a confusion matrix.
_NUMBERED = 10

_LONGEST_LABEL = 24


def lengths_svg(histogram: Mapping[str, Sequence[float]]) -> Markup:
    """Draw the shares of texts by their length in words, real (outline) and synthetic (filled).

    `histogram` is that of `dpray.evaluation.texts`; its last bin holds longer texts too.
    """
    edges = np.array(histogram["edges"])
    with figure_of_the_page(2.4) as (figure, axes):
        axes.stairs(histogram["synthetic"], edges, fill=True, color=ACCENT, alpha=0.45)
        axes.stairs(histogram["real"], edges, color=INK, linewidth=1.2)
        axes.set(xlabel="words (longer texts in the last bar)", xlim=(edges[0], edges[-1]))
        _percent(axes.yaxis)
        _legend(axes)
        return inline(figure)


def topics_svg(topics: Sequence[Mapping[str, Any]]) -> Markup:
    """Draw the share of each topic, real (outline) and synthetic (filled), named by its first
    terms. `topics` are those of `dpray.evaluation.topics`."""
    names = [", ".join(topic["terms"][:TERMS_SHOWN]) or "no terms" for topic in topics]
    places = np.arange(len(topics))
    with figure_of_the_page(0.9 + 0.34 * len(topics)) as (figure, axes):
        for side, style in (("synthetic", FILLED), ("real", OUTLINE)):
            axes.barh(places, [topic[side] for topic in topics], 0.7, **style)
        # A dollar sign in a text would start a formula.
        axes.set_yticks(places, names, parse_math=False)
        axes.invert_yaxis()
        _percent(axes.xaxis)
        _legend(axes)
        return inline(figure)


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
    places = np.arange(len(shown))
    with figure_of_the_page(0.9 + 0.34 * len(shown)) as (figure, axes):
        for side, style in (("synthetic", FILLED), ("ceiling", OUTLINE)):
            means, deviations = (
                [classes[side]["accuracy"][i][key] for i in shown] for key in ("mean", "deviation")
            )
            axes.barh(places, means, 0.7, **style)
            colour, above = (ACCENT, 0.12) if side == "synthetic" else (INK, -0.12)
            axes.errorbar(
                means, places + above, xerr=deviations, fmt="none", ecolor=colour, elinewidth=1.2
            )
        axes.set_yticks(places, _labels(classes, shown), parse_math=False)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.02)
        _percent(axes.xaxis)
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
        for axes, side, title in zip(
            both,
            ("synthetic", "ceiling"),
            ("Trained on synthetic records", "Trained on real records (ceiling)"),
            strict=True,
        ):
            shares = np.array(classes[side]["confusion"])[np.ix_(shown, shown)]
            _matrix(axes, shares)
            axes.set_title(title, fontsize=9)
            axes.set_xticks(range(len(names)), names, parse_math=False, rotation=90)
            rows = names if side == "synthetic" else [""] * len(names)
            axes.set_yticks(range(len(names)), rows, parse_math=False)
            axes.tick_params(length=0)
            axes.set_xlabel("answered")
        both[0].set_ylabel("label")
        return inline(figure)


def confusion_alternative(classes: Mapping[str, Any]) -> str:
    """Put `confusion_svg` into words: how often each label shown was right after training on
    synthetic records, and which label it was most often taken for."""
    shown = _largest(classes["records"])
    shares = np.array(classes["synthetic"]["confusion"])
    found = []
    for place in shown:
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

    sides = [
        Patch(facecolor="none", edgecolor=INK, linewidth=1.2, label=real),
        Patch(color=ACCENT, alpha=0.45, label=synthetic),
    ]
    axes.legend(handles=sides, frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)


# The template of the report's private part calls these by name.
PICTURES: Mapping[str, Callable[..., str]] = {
    "class_accuracy_svg": class_accuracy_svg,
    "confusion_alternative": confusion_alternative,
    "confusion_svg": confusion_svg,
    "lengths_svg": lengths_svg,
    "map_svg": map_svg,
    "topics_svg": topics_svg,
}
