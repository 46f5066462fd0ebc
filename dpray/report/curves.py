"""`curves_svg` draws curves over epsilon, one per method, in colours and marks that all pictures of
a page share. A click on a point leads to its row in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from markupsafe import Markup

from dpray.report.pictures import (
    ACCENT,
    COLOURS,
    INK,
    LINE,
    MUTED,
    PAPER,
    SECOND,
    THIRD,
    figure_of_the_page,
    inline,
)

LOOKS = (
    ("o", ACCENT, '<circle cx="6" cy="6" r="4.5"/>'),
    ("s", SECOND, '<path d="M2 2h8v8H2z"/>'),
    ("^", THIRD, '<path d="M6 1.5 10.8 10H1.2z"/>'),
    ("D", INK, '<path d="M6 1 11 6 6 11 1 6z"/>'),
    ("v", ACCENT, '<path d="M1.2 2h9.6L6 10.5z"/>'),
    ("p", SECOND, '<path d="M6 1 11 4.6 9.1 10.5H2.9L1 4.6z"/>'),
    ("h", THIRD, '<path d="M6 1 10.3 3.5v5L6 11 1.7 8.5v-5z"/>'),
    ("d", INK, '<path d="M6 1 9 6 6 11 3 6z"/>'),
)
"""The methods' marks and colours, in their order, for matplotlib and as SVG 12 units wide. Chains
come after the methods, and after four of them the marks begin again."""

WIDTH = 3.7
"""Two pictures of so many inches stand side by side on a page."""

APART = 1.09
"""Points of two methods stand apart by this factor of epsilon in such a picture, so that none hides
another; in wider ones by less."""


@dataclass(frozen=True)
class Point:
    """A method's value at an epsilon; `row` is the id of its row in a table.

    `state` is "enough" for a signal above its noise (a full mark), "below" for one that is not (a
    hollow mark), and "none" without a plan (a cross).
    """

    epsilon: float
    value: float
    row: str
    deviation: float = 0.0
    state: Literal["enough", "below", "none"] = "enough"


def row(name: str, epsilon: float) -> str:
    """Return the id of a method's row in the table of an epsilon, which a point links to."""
    return f"{name}-at-{epsilon:g}"


def look(place: int) -> tuple[str, str, str]:
    return LOOKS[place % len(LOOKS)]


def key_svg(place: int, is_hollow: bool = False) -> Markup:
    """Return the mark of the method at a place, to stand in a line of text."""
    _, colour, shape = look(place)
    fill = "none" if is_hollow else f"var({COLOURS[colour]})"
    return Markup(
        f'<svg class="mark" viewBox="0 0 12 12" aria-hidden="true" fill="{fill}" '
        f'stroke="var({COLOURS[colour]})">{shape}</svg>'
    )


def curves_svg(
    curves: Mapping[str, Sequence[Point]],
    *,
    line: float | None = None,
    linear_to: float | None = None,
    from_zero: bool = True,
    height: float = 2.5,
    width: float = WIDTH,
) -> Markup:
    """Draw the points of every method over epsilon, joined by lines, and a dotted line at `line`.

    The axis of the values is linear, or with `linear_to` logarithmic from there on.
    """
    from matplotlib.ticker import FuncFormatter, NullLocator

    with figure_of_the_page(height, width=width) as (figure, axes):
        for place, points in enumerate(curves.values()):
            shift = APART ** ((place - (len(curves) - 1) / 2) * WIDTH / width)
            for point in points:
                _mark(axes, point, shift * point.epsilon, place)
            joined = [point for point in points if point.state != "none"]
            epsilons = [shift * point.epsilon for point in joined]
            values = [point.value for point in joined]
            axes.plot(epsilons, values, color=look(place)[1], linewidth=1.2)
        if line is not None:
            axes.axhline(line, color=MUTED, linewidth=1.0, linestyle=(0, (1, 2)), zorder=1)
        tried = sorted({point.epsilon for points in curves.values() for point in points})
        axes.set(xscale="log", xlabel="epsilon")
        axes.set_xticks(tried, [f"{epsilon:g}" for epsilon in tried])
        axes.xaxis.set_minor_locator(NullLocator())
        if linear_to is not None:
            axes.set_yscale("symlog", linthresh=linear_to, linscale=0.5)
            axes.yaxis.set_minor_locator(NullLocator())
        if from_zero:
            axes.set_ylim(bottom=0.0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:,.10g}"))
        axes.grid(axis="y", color=LINE, linewidth=0.6)
        axes.set_axisbelow(True)
        svg = inline(figure)
    # The links are for pointers alone: who reads by the keyboard has the table.
    return Markup(str(svg).replace(' target="_blank"', ' tabindex="-1"'))


def _mark(axes: Any, point: Point, epsilon: float, place: int) -> None:
    mark, colour, _ = look(place)
    if point.deviation:
        bar: Any = {"ecolor": colour, "elinewidth": 1.0, "capsize": 2.5}
        axes.errorbar(epsilon, point.value, point.deviation, fmt="none", **bar)
    (drawn,) = axes.plot(
        epsilon,
        point.value,
        color=colour,
        marker="x" if point.state == "none" else mark,
        markersize=7,
        markerfacecolor=colour if point.state == "enough" else PAPER,
        markeredgewidth=1.4,
        zorder=3,
        clip_on=False,
    )
    drawn.set_url(f"#{point.row}")
