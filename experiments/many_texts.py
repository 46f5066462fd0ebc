"""As many texts as epsilon pays for: 100, 500 and 2,000 texts of each method at epsilon 1.

`python experiments/many_texts.py DATA/METHOD[@TEXTS[#RUN]]...` makes the runs that are not there
yet, and keeps their figures in experiments/measured/many_texts. DATA is `clinic`, 20,000 notes of
sizes.py with the packaged model, or a coded set of four_methods.py with SmolLM2, whose runs of 100
texts are those of that script.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import four_methods
import numpy as np
import sizes
from embedding import embed, embedded
from figures import Figures, draw, keep, mean_recall
from runs import HERE, RUNS, accuracy, as_embedded, largest_clip, released, rows
from sets import SETS, part

from dpray.evaluation.downstream import Embedded

EPSILON, TEXTS, RUNS_OF_EACH = 1.0, (100, 500, 2_000), 2
NOTES = 20_000
CLINIC = "clinic"
METHODS = {
    "private_prediction": "private prediction",
    "aug_pe": "Aug-PE",
    "dp_kps": "DP-KPS",
    "dp_sgd": "DP-SGD",
}
TITLES = {
    CLINIC: "clinic notes",
    "agnews_coded": "AG News",
    "trec_coded": "TREC",
    "banking77_coded": "a bank's departments",
}
DRAWS = 5
"""Draws of real records, for each number of texts."""

KEPT = HERE / "measured" / "many_texts"


class Cell(NamedTuple):
    """One run."""

    data: str
    method: str
    texts: int
    number: int

    @property
    def name(self) -> str:
        return f"{self.method}-{self.texts}-{self.number}"

    @property
    def kept(self) -> Path:
        return KEPT / self.data / f"{self.name}.json"

    @property
    def figures(self) -> Figures | None:
        if self.data in SETS and self.texts == TEXTS[0]:
            return self.of_set.figures
        return json.loads(self.kept.read_text()) if self.kept.exists() else None

    @property
    def of_set(self) -> four_methods.Cell:
        """The cell of four_methods.py that differs in the number of texts alone."""
        bare = self.method == "private_prediction"
        method = "private_prediction_bare" if bare else self.method
        return four_methods.Cell(self.data, method, EPSILON, self.number)

    def settings(self) -> tuple[str, list[str]]:
        """Return the file of the run's configuration, and what it changes but for epsilon."""
        if self.data == CLINIC:
            cell = sizes.Cell(self.method, EPSILON, NOTES, self.number)
            file, found = f"../jobs/{self.method}_cpu", sizes.changes(cell)
        else:
            file, found = f"smollm2/{self.method}", four_methods.changes(self.of_set)
        if self.method != "private_prediction":
            return file, [*found, f"method.records={self.texts}"]
        found.append(f"method.texts={self.texts}")
        clip = largest_clip(HERE / f"{file}.yaml", [*found, f"privacy.epsilon={EPSILON}"])
        return file, [*found, f"method.clip_bound={clip}"]


def cells(data: str, method: str) -> Iterator[Cell]:
    """Yield the cells of a method, the first run of every one before the second of any."""
    for number, texts in product(range(RUNS_OF_EACH), TEXTS):
        yield Cell(data, method, texts, number)


@cache
def real(data: str, name: str) -> Embedded:
    """Return the `private` or `test` records of a set, as vectors."""
    if data in SETS:
        return embedded(part(data, name))
    sizes.data(NOTES)
    file = "test" if name == "test" else f"{NOTES}"
    return as_embedded(rows(sizes.FOLDER / "data" / f"{file}.jsonl"), embed)


def scores(made: Embedded, data: str) -> Figures:
    test = real(data, "test")
    return {"accuracy": accuracy(made, test), "by_label": mean_recall(made, test)}


def measure(cell: Cell) -> None:
    """Make the run if it is not there, and keep what its texts teach."""
    out = RUNS / "many_texts" / cell.data / cell.name
    file, changes = cell.settings()
    minutes = four_methods.make_once(file, out, EPSILON, changes)
    records = released(out)
    of_texts = scores(as_embedded(records, embed), cell.data)
    keep(cell.kept, {"texts": len(records), **of_texts, "cpu_minutes": minutes})


def measure_real(data: str) -> None:
    """Keep what so many private records teach, the mean of some draws."""
    private = real(data, "private")
    for texts in TEXTS:
        of_draws = [scores(draw(private, texts, seed), data) for seed in range(DRAWS)]
        means = {name: float(np.mean([each[name] for each in of_draws])) for name in of_draws[0]}
        keep(KEPT / data / f"real-{texts}.json", {"texts": texts, **means})


def section() -> list[str]:
    """Return the section of docs/results.md, of the figures that are kept."""
    return [
        "## More texts",
        "",
        "Each figure is the accuracy by label of a classifier that learns from one run's texts, "
        f"at epsilon {EPSILON:g} (`python experiments/many_texts.py DATA/METHOD@TEXTS`). The "
        f"columns are numbers of texts. Clinic notes are {NOTES:,} notes of the packaged clinic, "
        "with the packaged model. The other sets have codes for labels, with SmolLM2. Real "
        f"records: the mean of {DRAWS} draws of that number.",
        "",
        "| data | method | " + " | ".join(f"{texts:,}" for texts in TEXTS) + " |",
        "|---|---|" + "---:|" * len(TEXTS),
        *(line for data in TITLES if (KEPT / data).exists() for line in lines(data)),
    ]


def lines(data: str) -> Iterator[str]:
    """Yield a row of the table for real records and for each method that was run."""
    title = TITLES[data]
    found = [json.loads((KEPT / data / f"real-{texts}.json").read_text()) for texts in TEXTS]
    yield f"| {title} | real records | " + " | ".join(f"{f['by_label']:.2f}" for f in found) + " |"
    for method, name in METHODS.items():
        runs = {
            texts: [c.figures for c in cells(data, method) if c.texts == texts and c.figures]
            for texts in TEXTS
        }
        if any(runs.values()):
            yield f"| {title} | {name} | " + " | ".join(map(shown, runs.values())) + " |"


def shown(runs: Sequence[Figures]) -> str:
    """Return the scores of the runs; a dash stands for none."""
    return ", ".join(f"{figures['by_label']:.2f}" for figures in runs) or "-"


def named(name: str) -> list[Cell]:
    """Return the cells of DATA/METHOD[@TEXTS[#RUN]]."""
    name, _, number = name.partition("#")
    name, _, texts = name.partition("@")
    data, _, method = name.partition("/")
    return [
        cell
        for cell in cells(data, method)
        if texts in ("", f"{cell.texts}") and number in ("", f"{cell.number}")
    ]


if __name__ == "__main__":
    for each in [cell for name in sys.argv[1:] for cell in named(name)]:
        if not (KEPT / each.data / f"real-{TEXTS[0]}.json").exists():
            measure_real(each.data)
        if each.figures is None:
            measure(each)
