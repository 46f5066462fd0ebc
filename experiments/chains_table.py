"""Chains of methods beside the single ones at the same epsilon, for results_tables.md; the runs are
those of experiments/four_methods.py."""

from __future__ import annotations

from typing import Any

from four_methods import METHODS, Cell

DATA, EPSILON = "agnews", 4.0
PARTS = {"kps": "dp_kps"}
"""A chain's name holds those of its methods, DP-KPS's in short."""


def figures(method: str) -> dict[str, Any] | None:
    return Cell(DATA, method, EPSILON, 0).figures


def parts(chain: str) -> list[str]:
    """Return the chain's methods that were run by themselves, as topics cannot be."""
    first, _, last = chain.removeprefix("chain_").partition("_")
    return [name for name in (PARTS.get(first, first), last) if figures(name) is not None]


def accuracy(method: str) -> float:
    found = figures(method)
    assert found is not None
    return float(found["accuracy"])


def table() -> list[str]:
    """Return the section of the page."""
    chains = [name for name in METHODS if name.startswith("chain_") and figures(name)]
    single = [name for name in METHODS if name not in chains and figures(name)]
    best = max(single, key=accuracy)
    lines = [
        f"## Chained methods against single ones: {DATA}, eps {EPSILON:g}",
        "",
        "`python experiments/four_methods.py agnews`; the same runs as in the table of the four "
        f"methods, one of each. The best single method is {METHODS[best]}, with an accuracy of "
        f"{accuracy(best):.3f}. Gain: the chain's accuracy less that of the better one of its "
        "own methods at the whole epsilon, and less that of the best single method.",
        "",
        "| chain | accuracy | MAUVE | copies, public | its better method | gain | over the best |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in chains:
        found, own = figures(name), max(parts(name), key=accuracy)
        assert found is not None
        row = [
            METHODS[name],
            f"{found['accuracy']:.3f}",
            f"{found['mauve']:.3f}",
            f"{found['copies_public']:.0%}",
            f"{METHODS[own]}, {accuracy(own):.3f}",
            f"{accuracy(name) - accuracy(own):+.3f}",
            f"{accuracy(name) - accuracy(best):+.3f}",
        ]
        lines.append("| " + " | ".join(row) + " |")
    return lines
