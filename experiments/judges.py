"""The papers' judges on releases of four_methods.py, for docs/papers.md.

`python experiments/judges.py` judges the releases of `JUDGED` that are in out/results and were not
judged yet, by paper_scores.py, and keeps its scores in experiments/measured/judges. A release and
the real records next to it, `REAL` private ones, are judged on `TESTED` test records. Language
models as judges (`paper_scores.py --lm`) take hours on a CPU, and are left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any

from four_methods import METHODS, Cell
from paper_scores import Example, scores
from runs import HERE, finished, released, rows
from sets import part

KEPT = HERE / "measured" / "judges"
DATA, EPSILON, REAL, TESTED, SEEDS = "agnews_coded", 1.0, 100, 300, 2
JUDGED = ("aug_pe", "private_prediction_bare", "dp_kps", "dp_sgd")
EMBEDDER = "sentence-transformers/all-MiniLM-L6-v2"

Found = Mapping[str, Any]


def trained(number: int) -> Callable[[Found, str], float]:
    return lambda found, side: found["classifiers"][number][side]["accuracy"]["mean"]


def apart(name: str) -> Callable[[Found, str], float]:
    """Return the score of a distance, which is a number or has one that says how far."""
    first, second = name.split(".")
    return lambda found, side: found["distances"][side][first][second]


JUDGES: Mapping[str, tuple[str, Callable[[Found, str], float]]] = {
    "three layers on embeddings (Nagesh)": ("accuracy", trained(0)),
    "three layers with Deep CORAL (Nagesh)": ("accuracy", trained(1)),
    "MiniLM, fine-tuned (Yue, Xie: BERT, RoBERTa)": ("accuracy", trained(2)),
    "three nearest neighbours (Yue)": ("F1", apart("neighbours.f1")),
    "lengths (Yue)": ("total variation", apart("lengths.tv")),
    "topics (Yue)": ("total variation", apart("topics.tv")),
}


def examples(records: list[dict[str, Any]]) -> list[Example]:
    return [(record["text"], str(record["label"])) for record in records]


def judge(method: str) -> None:
    """Judge a release that was not judged yet; it has to be there."""
    cell, kept = Cell(DATA, method, EPSILON, 0), KEPT / f"{method}.json"
    if kept.exists() or not finished(cell.folder):
        return
    sets = {
        "synthetic": examples(released(cell.folder)),
        "ceiling": examples(rows(part(DATA, "private"))[:REAL]),
        "test": examples(rows(part(DATA, "test"))[:TESTED]),
    }
    asked = argparse.Namespace(
        networks=True, distances=True, phrases=False, embedder=EMBEDDER,
        encoder=EMBEDDER, lm=None, seeds=SEEDS,
    )  # fmt: skip
    KEPT.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(scores(sets, asked), indent=1) + "\n")


def section() -> list[str]:
    """Return the section of docs/papers.md, after judging the releases that are there."""
    for method in JUDGED:
        judge(method)
    files = {method: KEPT / f"{method}.json" for method in JUDGED}
    found = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    if not found:
        return []
    sides = [(METHODS[name], scored, "synthetic") for name, scored in found.items()]
    sides.append((f"{REAL} real records", next(iter(found.values())), "ceiling"))
    return [
        "## The papers' judges",
        "",
        "The judges of the four papers scored releases about AG News with codes for labels, at "
        f"epsilon {EPSILON:g}, one run each. They were tested on {TESTED} real records, with "
        f"{SEEDS} seeds and without the language models (`python experiments/judges.py`):",
        "",
        f"| judge | measures | {' | '.join(name for name, *_ in sides)} |",
        f"|---|---|{'---|' * len(sides)}",
        *(
            f"| {name} | {measure} | {' | '.join(f'{score(*side):.2f}' for _, *side in sides)} |"
            for name, (measure, score) in JUDGES.items()
        ),
    ]


if __name__ == "__main__":
    print("\n".join(section()))
