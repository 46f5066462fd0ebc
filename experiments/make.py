"""Writes docs/results.md, and the pages of all tables, of texts and of the small model beside this
script, from the finished runs of its configurations and from the figures in measured/.

`python experiments/make.py NAME...` runs the named ones first: a file's name, and for Aug-PE with
the epsilon, as in `aug_pe_yelp@1`. Needs the folder ../shared with its texts and its model, and for
Aug-PE an endpoint: `dpray serve experiments/serve.yaml`. With `--only WORDS` only the sections are
written anew whose names begin so; all others stay as they are.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import attack_table
import aug_pe_table
import chains_table
import dp_sgd_signal
import dp_sgd_table
import drugs_table
import four_methods
import four_methods_picture
import four_methods_table
import gpu_table
import kps_table
import many_texts
import peers_table
import peers_texts
import planner_table
import regret
import reproduction
import secret_batches
import sizes_picture
import typer
from embedding import Kept, embed, embedded, embedder
from figures import SAMPLES
from runs import DATA, HERE, RUNS, rows

from dpray.evaluation.downstream import compare_downstream
from dpray.evaluation.texts import structure

RESULTS_HEAD = """# Measured results

With SmolLM2-135M-Instruct on two cores, without a GPU. It is small and far from sharp: compare the
rows, do not admire them. Which method to take when: [choosing.md](choosing.md).

`python experiments/make.py` writes this page and the pages of tables and texts:

- [all tables](../experiments/results_tables.md): the other data sets, chained methods, code of
  other authors, rehearsals;
- [texts](../experiments/results_texts.md): ten of each method;
- [settings of each method](../experiments/results_small_model.md), with a smaller model;
- [speed and rounding on a GPU](../experiments/results_gpu.md).
"""

TABLES_HEAD = """# All tables

With SmolLM2-135M-Instruct on two cores, without a GPU, but for the sections that name another
model. [docs/results.md](../docs/results.md) says what the tables say and how to read them. Every
section names the command that makes its runs; `python experiments/make.py` writes the page.
"""

TEXTS_HEAD = f"""# Texts that the methods wrote

{SAMPLES} texts of each method with SmolLM2-135M-Instruct at epsilon 4, or at 1 where there is no
such run. They are those of the runs in [results_tables.md](results_tables.md), at equal distances
in each release, as they are; nobody chose them. Written by `python experiments/make.py`.
"""

SMALL_MODEL_HEAD = """# Appendix: results with a small model

On two cores, without a GPU, with a model of 12.5 M parameters that hardly reads its prompts. For a
language model that does see [docs/results.md](../docs/results.md); these tables compare settings of
each method.
Written by `python experiments/make.py NAME...`, which runs `dpray run experiments/NAME.yaml`; the
runs of DP-KPS, of DP-SGD and of the four methods beside each other by
`experiments/{kps_table,dp_sgd_table,reproduction,attack_table,secret_batches}.py`.
"""


def run(name: str) -> None:
    """`file` or `file@epsilon`, into a folder of its own."""
    file, _, epsilon = name.partition("@")
    more = []
    if epsilon:
        value = ".inf" if epsilon == "inf" else epsilon
        places = (f"output.path={RUNS}/{name}", f"privacy.ledger=sqlite:///{RUNS}/{name}.db")
        more = [f"privacy.epsilon={value}", *places]
    command = [sys.executable, "-m", "dpray", "run", str(HERE / f"{file}.yaml"), *more]
    subprocess.run(command, check=True)


def finished(*names: str) -> list[tuple[str, dict[str, Any]]]:
    """The reports of those runs that are done."""
    paths = {name: RUNS / name / "privacy_report.json" for name in names}
    return [(name, json.loads(path.read_text())) for name, path in paths.items() if path.exists()]


@cache
def before() -> list[str]:
    """Return the lines of all pages as they were; each page begins with a heading."""
    return [line for page in PAGES if page.exists() for line in page.read_text().splitlines()]


def row_as_it_was(name: str) -> list[str]:
    """The table's row of a run that was made elsewhere, or before: it stays."""
    return [line for line in before() if line.startswith(f"| {name} |")][:1]


def section_as_it_was(heading: str) -> list[str]:
    """The same for a section none of whose runs is at hand."""
    starts = [i for i, line in enumerate(before()) if line.startswith(("# ", "## "))]
    for start, end in pairwise([*starts, len(before())]):
        if before()[start].startswith(f"## {heading}"):
            return "\n".join(before()[start:end]).strip().splitlines()
    return []


def share(report: dict[str, Any]) -> str:
    return f"{report['tokens']['private'] / report['tokens']['total']:.0%}"


def cells(name: str, report: dict[str, Any]) -> list[str]:
    method = report["method"]
    return [
        name,
        f"{method['batch_size']}",
        f"{method['clip']}, {method['clip_bound']:g}",
        f"{method['temperature']:g}",
        f"{report['epsilon']:.2f}",
        f"{report['records']}",
        share(report),
    ]


def news() -> list[str]:
    table = [
        "## Private prediction: AG News, 4,000 private records, delta 1e-6",
        "",
        "A logistic regression on MiniLM embeddings, tested on 3,800 real test texts; mean and "
        "deviation over 5 bootstraps.",
        "",
        "| run | s | clip, c | tau | eps | records | private tokens | accuracy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ceiling = ""
    test, private = (embedded(DATA / "agnews" / f"{part}.jsonl") for part in ("test", "private"))
    for name in ("agnews_recentred", "agnews_dclip"):
        if not (done := finished(name)):
            table += row_as_it_was(name)
            continue
        report = done[0][1]
        synthetic = embedded(RUNS / name / "synthetic.jsonl")
        result = compare_downstream({"synthetic": synthetic, "ceiling": private}, test, 5)
        table.append("| " + " | ".join([*cells(name, report), spread(result["synthetic"])]) + " |")
        ceiling = spread(result["ceiling"])
    real = "real records (ceiling)"
    return table + (
        [f"| {real} | | | | | 4000 | | {ceiling} |"] if ceiling else row_as_it_was(real)
    )


def spread(row: dict[str, Any]) -> str:
    return f"{row['accuracy']['mean']:.3f} ± {row['accuracy']['deviation']:.3f}"


def films() -> list[str]:
    schema = json.loads((HERE / "film.schema.json").read_text())
    table = [
        "## Private prediction: film records in JSON, 8,000 private records, delta 1e-6",
        "",
        "With the sparse vector, tokens that the public prompt predicts about as well are free.",
        "",
        "| run | s | clip, c | tau | eps | records | private tokens | parses | fits the schema |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in ("films_plain", "films_sparse_vector"):
        if not (done := finished(name)):
            table += row_as_it_was(name)
            continue
        report = done[0][1]
        texts = [row["text"] for row in rows(RUNS / name / "synthetic.jsonl")]
        found = structure(texts, schema)
        shares = [f"{found[key]:.1%}" for key in ("json_parse_share", "schema_share")]
        table.append("| " + " | ".join([*cells(name, report), *shares]) + " |")
    return table


def aug_pe(name: str) -> list[str]:
    runs = finished(*(f"aug_pe_{name}@{epsilon}" for epsilon in ("1", "2", "4", "inf")))
    return aug_pe_table.table(name, runs, embedded, embedder()) if runs else []


Sections = dict[str, Callable[[], list[str]]]

RESULTS: Sections = {
    "Labels that only private records explain": four_methods_picture.coded_section,
    "New facts, in sentences": drugs_table.section,
    "More records": sizes_picture.section,
    "More texts": many_texts.section,
    "With public texts of the kind": four_methods_picture.section,
}

TABLES: Sections = {
    "SmolLM2-135M, what the tables say": lambda: [
        "## SmolLM2-135M, what the tables say",
        "",
        *four_methods_table.READING.splitlines(),
    ],
    "SmolLM2-135M, how to read the tables": lambda: [
        "## SmolLM2-135M, how to read the tables",
        "",
        *four_methods_table.LEGEND.splitlines(),
    ],
    **{
        f"SmolLM2-135M, four methods: {name}": partial(four_methods_table.table, name)
        for name in four_methods.SETS
    },
    "Chained methods against single ones": chains_table.table,
    "Peers: ": peers_table.table,
    "Texts that an epsilon pays for": peers_texts.table,
    "The plan against the run": planner_table.table,
    "The choice of a rehearsal": regret.table,
    "How much noise DP-SGD learns through": dp_sgd_signal.table,
}

TEXTS: Sections = {
    f"{name}: {SAMPLES} texts a method": partial(four_methods_table.samples, name)
    for name in four_methods.SETS
}

SMALL_MODEL: Sections = {
    **{
        f"The four methods: {name}": partial(reproduction.table, name, embedded, embed)
        for name in ("agnews", "yelp")
    },
    "The four methods: what the two tables say": lambda: [
        "## The four methods: what the two tables say",
        "",
        *reproduction.READING.splitlines(),
    ],
    **{
        f"Attacks: {name}": partial(attack_table.table, name, Kept()) for name in ("agnews", "yelp")
    },
    "Secret batches: agnews": partial(secret_batches.table, embedded),
    "Private prediction: AG News": news,
    "Private prediction: film records": films,
    **{f"Aug-PE: {name}": partial(aug_pe, name) for name in ("yelp", "pubmed")},
    **{f"DP-KPS: {name}": partial(kps_table.table, name, embedded) for name in ("agnews", "yelp")},
    **{
        f"DP-SGD: {name}": partial(dp_sgd_table.table, name, embedded)
        for name in ("agnews", "yelp")
    },
}

PAGES: dict[Path, tuple[str, Sections]] = {
    HERE.parent / "docs" / "results.md": (RESULTS_HEAD, RESULTS),
    HERE / "results_tables.md": (TABLES_HEAD, TABLES),
    HERE / "results_texts.md": (TEXTS_HEAD, TEXTS),
    HERE / "results_small_model.md": (SMALL_MODEL_HEAD, SMALL_MODEL),
    HERE / "results_gpu.md": (gpu_table.HEAD, gpu_table.sections()),
}


def written(head: str, sections: Sections, only: str) -> str:
    """The whole page; sections whose names do not begin with `only` stay as they were."""
    lines = [head]
    for heading, make_section in sections.items():
        made = make_section() if heading.startswith(only) else []
        if section := made or section_as_it_was(heading):
            lines += [*section, ""]
    return "\n".join(lines)


def main(names: list[str] = typer.Argument(None), only: str = "") -> None:
    for wanted in names or []:
        run(wanted)
    pages = {page: written(head, sections, only) for page, (head, sections) in PAGES.items()}
    for page, text in pages.items():
        page.write_text(text)


if __name__ == "__main__":
    typer.run(main)
