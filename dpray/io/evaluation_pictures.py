"""Pictures for the evaluation's part of the report: from private data, like its numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from dpray.io.pictures import ACCENT, INK, figure_of_the_page, inline

TERMS_SHOWN = 4


def lengths_svg(histogram: Mapping[str, Sequence[float]]) -> Markup:
    """Shares of texts by their length in words, real (outline) and synthetic (filled).

    `histogram`: see `dpray.evaluation.lengths`; its last bin holds longer texts too.
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
    """The share of each topic, real (outline) and synthetic (filled), named by its first terms.

    `topics`: see `dpray.evaluation.topics`.
    """
    names = [", ".join(topic["terms"][:TERMS_SHOWN]) or "no terms" for topic in topics]
    places = np.arange(len(topics))
    with figure_of_the_page(0.9 + 0.34 * len(topics)) as (figure, axes):
        axes.barh(places, [topic["synthetic"] for topic in topics], 0.7, color=ACCENT, alpha=0.45)
        axes.barh(
            places, [topic["real"] for topic in topics], 0.7, fill=False, edgecolor=INK,
            linewidth=1.2,
        )  # fmt: skip
        # A dollar sign in a text would start a formula.
        axes.set_yticks(places, names, parse_math=False)
        axes.invert_yaxis()
        _percent(axes.xaxis)
        _legend(axes)
        return inline(figure)


def _percent(axis: Any) -> None:
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _legend(axes: Any) -> None:
    from matplotlib.patches import Patch

    sides = [
        Patch(facecolor="none", edgecolor=INK, linewidth=1.2, label="real"),
        Patch(color=ACCENT, alpha=0.45, label="synthetic"),
    ]
    axes.legend(handles=sides, frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
