"""The report's pictures are SVG in the page's own colours, so that they fit both themes."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from markupsafe import Markup

# matplotlib draws in these colours, and `inline` replaces each by the page's variable.
COLOURS = {"#010203": "--ink", "#040506": "--muted", "#070809": "--accent", "#0a0b0c": "--line"}
INK, MUTED, ACCENT, LINE = COLOURS


def iterations_svg(history: Sequence[Mapping[str, Any]]) -> Markup:
    """Draw the concentration of the votes, and the lengths of the kept texts, over the iterations.

    `dpray.methods.aug_pe.release.iteration_history` describes `history`. Where the votes have
    noise, all of it is post-processing.
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


@contextmanager
def figure_of_the_page(height: float, columns: int = 1) -> Iterator[tuple[Any, Any]]:
    """Make a figure as wide as the page, in the page's colours, and its axes."""
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
        figure = Figure(figsize=(7.4, height), layout="constrained")
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
