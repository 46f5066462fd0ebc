"""Writes docs/results.md, the headlines of docs/papers.md, and the pages of all tables, of texts
and of GPUs beside this script, from the finished runs and from the figures in measured/.

What follows the line BY_HAND in a section stays as it is, as does a section without a function.
Needs the folder ../shared with its texts. With `--only WORDS` only the sections are written again
whose names begin so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path

import algorithm_1
import aug_pe_ablations
import drugs_table
import first_release
import four_methods
import four_methods_picture
import four_methods_table
import gpu_table
import judges
import kps_over_n
import kps_phrases
import learning_rates
import many_texts
import papers_table
import sizes
import sparse_vector
import typer
from figures import SAMPLES
from runs import HERE

BY_HAND = "<!-- by hand from here on -->"

RESULTS_HEAD = """# Measured results

Measured with SmolLM2-135M-Instruct on two cores without a GPU, unless a section says otherwise. The
model is small, so all scores are low. Compare rows with each other. [choosing.md](choosing.md) says
which method to take when.

`python experiments/make.py` writes this page and the pages of tables and texts:

- [all tables](../experiments/results_tables.md): other data sets, chains, others' code, rehearsals;
- [texts](../experiments/results_texts.md): ten of each method;
- [speed and rounding on a GPU](../experiments/results_gpu.md).
"""

TABLES_HEAD = """# All tables

With SmolLM2-135M-Instruct on two cores, without a GPU, but for the sections that name another
model. [docs/results.md](../docs/results.md) says what the tables say and how to read them. Every
section names the command that makes its runs; `python experiments/make.py` writes the page, but for
the last five sections: the scripts and settings that they name are those of commit 3df397e0.
"""

TEXTS_HEAD = f"""# Texts that the methods wrote

{SAMPLES} texts of each method with SmolLM2-135M-Instruct at epsilon 4, or at 1 where there is no
such run. They are those of the runs in [results_tables.md](results_tables.md), at equal distances
in each release, as they are; nobody chose them. Written by `python experiments/make.py`.
"""


def section_as_it_was(page: str, heading: str) -> list[str]:
    """Return the lines of a section of a page."""
    lines = page.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith(("# ", "## "))]
    for start, end in pairwise([*starts, len(lines)]):
        if lines[start].startswith(f"## {heading}"):
            return "\n".join(lines[start:end]).strip().splitlines()
    return []


Sections = Mapping[str, Callable[[], list[str]] | None]

RESULTS: Sections = {
    "Labels that only private records explain": four_methods_picture.coded_section,
    "New facts, in sentences": drugs_table.section,
    "More records": sizes.section,
    "More texts": many_texts.section,
    "DP-KPS at the paper's size": kps_over_n.section,
    "How many terms of a record count": kps_phrases.section,
    "Steps and learning rates of DP-SGD": learning_rates.section,
    "Algorithm 1 as printed": algorithm_1.section,
    "The sparse vector": sparse_vector.section,
    "Aug-PE, one key at a time": aug_pe_ablations.section,
    "With public texts of the kind": four_methods_picture.section,
    "A smaller model": None,
    "First releases": first_release.section,
    "Attributes, measured in pairs": None,
}

TABLES: Sections = {
    "SmolLM2-135M, what the tables say": None,
    "SmolLM2-135M, how to read the tables": None,
    **{
        f"SmolLM2-135M, four methods: {name}": partial(four_methods_table.table, name)
        for name in four_methods.SETS
    },
    "Chained methods against single ones": None,
    "Peers: ": None,
    "Texts that an epsilon pays for": None,
    "The choice of a rehearsal": None,
    "How much noise DP-SGD learns through": None,
}

TEXTS: Sections = {
    f"{name}: {SAMPLES} texts a method": partial(four_methods_table.samples, name)
    for name in four_methods.SETS
}

PAPERS_HEAD = """# The four papers

dpray follows four papers. This page puts their figures next to ours, and names the place of every
line, equation, default, prompt, metric and ablation, with the reason where dpray differs.
"""

PAPERS: Sections = {
    "Headlines": papers_table.section,
    "The papers' judges": judges.section,
    "Presets": None,
    "Private prediction (Amin": None,
    "DP-KPS (Nagesh": None,
    "Aug-PE (Xie": None,
    "DP-SGD (Yue": None,
    "Why neither Opacus nor FAISS": None,
}

PAGES: dict[Path, tuple[str, Sections]] = {
    HERE.parent / "docs" / "results.md": (RESULTS_HEAD, RESULTS),
    HERE.parent / "docs" / "papers.md": (PAPERS_HEAD, PAPERS),
    HERE / "results_tables.md": (TABLES_HEAD, TABLES),
    HERE / "results_texts.md": (TEXTS_HEAD, TEXTS),
    HERE / "results_gpu.md": (gpu_table.HEAD, gpu_table.sections()),
}


def written(old: str, head: str, sections: Sections, only: str) -> str:
    """Return the whole page, of which `old` is the present text."""
    lines = [head]
    for heading, make_section in sections.items():
        section = section_as_it_was(old, heading)
        if make_section and heading.startswith(only) and (made := make_section()):
            by_hand = section[section.index(BY_HAND) :] if BY_HAND in section else []
            section = [*made, *([""] if by_hand else []), *by_hand]
        if section:
            lines += [*section, ""]
    return "\n".join(lines)


def main(only: str = "") -> None:
    for page, (head, sections) in PAGES.items():
        page.write_text(written(page.read_text(), head, sections, only))


if __name__ == "__main__":
    typer.run(main)
