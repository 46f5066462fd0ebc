"""The sections of docs/results.md, results_tables.md and results_texts.md on four_methods.py."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from embedding import embedded
from figures import A_SIDE, SAMPLES, Figures, Yardstick, draw, rounded, spread
from four_methods import METHODS, Cell, cells
from runs import HERE
from sets import SETS, part, size

DRAWS = 3
"""Draws of real records."""


def table(data: str) -> list[str]:
    """The section of the page; empty where no run was measured."""
    found: dict[tuple[str, float], list[Figures]] = {}
    for method in METHODS:
        for cell in cells(data, method):
            if (figures := cell.figures) is not None:
                found.setdefault((method, cell.epsilon), []).append(figures)
    if not found:
        return []
    real = real_texts(data)
    lines = [
        f"## SmolLM2-135M, four methods: {data}, {size(data):,} private records",
        "",
        f"`python experiments/four_methods.py {data}`; {real['tests']:,} test texts.",
        "",
        "| method | eps | texts | accuracy | by label | distance | MAUVE | copies, public "
        "| private | membership | parses | CPU |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (method, epsilon), runs in found.items():
        texts = sorted({f"{figures['texts']}" for figures in runs}, key=int)
        line = [METHODS[method], f"{epsilon:g}", " to ".join(texts)]
        lines.append("| " + " | ".join([*line, *in_words(runs)]) + " |")
    for name, number in (("public", A_SIDE), ("private", A_SIDE), ("all private", size(data))):
        cells_of_row = [f"{name} records", "", f"{number}", *in_words(real[name])]
        lines.append("| " + " | ".join(cells_of_row) + " |")
    return lines


def real_texts(data: str) -> dict[str, Any]:
    """Return the figures of `A_SIDE` real records, for each of some draws from the `public` and the
    `private` ones, and of `all private` ones, with the number of `tests` and the mean of the
    private texts' `words`. Once computed, they are kept beside those of the runs."""
    path = HERE / "measured" / "smollm2" / data / "real.json"
    if not path.exists():
        yardstick = Yardstick(data)
        found: dict[str, Any] = {
            "tests": len(yardstick.test.labels),
            "words": np.mean([len(text.split()) for text in yardstick.private]),
        }
        for name in ("public", "private"):
            records = embedded(part(data, name))
            draws = [draw(records, A_SIDE, seed) for seed in range(DRAWS)]
            found[name] = [rounded(yardstick.of_vectors(few)) for few in draws]
        found["all private"] = [rounded(yardstick.of_vectors(records))]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
    read: dict[str, Any] = json.loads(path.read_text())
    return read


def in_words(runs: Sequence[Figures]) -> list[str]:
    """The columns from accuracy on; empty where there is no figure."""

    def values(name: str) -> list[float]:
        return [value for figures in runs if (value := figures.get(name)) is not None]

    def mean(name: str, form: str) -> str:
        return f"{np.mean(found):{form}}" if (found := values(name)) else ""

    return [
        *(
            spread(values(name)) if values(name) else ""
            for name in ("accuracy", "by_label", "distance", "mauve")
        ),
        mean("copies_public", ".0%"),
        mean("copies_private", ".0%"),
        mean("membership", ".3f"),
        mean("parses", ".0%"),
        mean("cpu_minutes", ".0f"),
    ]


def samples(data: str) -> list[str]:
    """The section with texts that each method released, at epsilon 4 or 1."""
    lines: list[str] = []
    for method, name in METHODS.items():
        for epsilon in (4.0, 1.0):
            if (kept := Cell(data, method, epsilon, 0).kept).exists():
                texts = json.loads(kept.read_text())["samples"]
                if texts:
                    lines += ["", f"{name}, eps {epsilon:g}:", "", *(f"1. {t}" for t in texts)]
                break
    if not lines:
        return []
    words = real_texts(data)["words"]
    heading = f"## {data}: {SAMPLES} texts a method"
    style = f"A real text is {SETS[data].style}. Real texts have {words:.0f} words on average."
    return [heading, "", style, *lines]
