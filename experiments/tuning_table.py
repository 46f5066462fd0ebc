"""This script measures what tuning on the private records gains DP-KPS, for results_tables.md.

`python experiments/tuning_table.py` makes the runs that are not there yet, of each candidate by
itself and of a tuning among them, each at the whole epsilon, and keeps their accuracies in
experiments/measured/tuning.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from embedding import embed, embedded
from reproduction import spread
from runs import DATA, HERE, RUNS, accuracy, as_embedded, finished, make, released

SETS = {"agnews": 3e-5, "yelp": 4.5e-5}
"""The data sets, each with delta."""

EPSILONS = (1.0, 4.0, 8.0)
RUNS_OF_EACH = 3
RECORDS = 1000

CANDIDATES: dict[str, Sequence[str]] = {
    "the defaults": (),
    "3 terms a record": ("phrases_per_record=3",),
    "300 terms": ("vocabulary_size=300",),
    "no contrast, no threshold": ("contrast=0", "threshold=0"),
}
TUNED = "tuned among the four"
WAYS = (*CANDIDATES, TUNED)
GAMMA = 0.05
KEPT = HERE / "measured" / "tuning"


def tuning() -> str:
    candidates = ", ".join(
        f"{{{', '.join(keys).replace('=', ': ')}}}" for keys in CANDIDATES.values()
    )
    return f"method.tuning={{candidates: [{candidates}], eta: 0, gamma: {GAMMA}}}"


def folder(data: str, epsilon: float, way: str, number: int) -> Path:
    return RUNS / f"tuning_{data}" / f"{WAYS.index(way)}-{epsilon:g}-{number}"


def measure(data: str, epsilon: float) -> None:
    """Keep the accuracies of each way's runs."""
    test, found = embedded(DATA / data / "test.jsonl"), {}
    for way in WAYS:
        keys = [f"method.{key}" for key in CANDIDATES.get(way, ())]
        accuracies = []
        for number in range(RUNS_OF_EACH):
            out = folder(data, epsilon, way, number)
            if not finished(out):
                more = [f"privacy.delta={SETS[data]}", f"method.records={RECORDS}"]
                more += [tuning()] if way == TUNED else keys
                make(f"kps_{data}", out, epsilon, more)
            accuracies.append(round(accuracy(as_embedded(released(out), embed), test), 4))
        found[way] = accuracies
    KEPT.mkdir(parents=True, exist_ok=True)
    kept(data, epsilon).write_text(json.dumps(found, indent=1) + "\n")


def kept(data: str, epsilon: float) -> Path:
    return KEPT / f"{data}-{epsilon:g}.json"


def table() -> list[str]:
    """Return the section of the page; empty where nothing was measured."""
    found = {
        (data, epsilon): json.loads(kept(data, epsilon).read_text())
        for data, epsilon in product(SETS, EPSILONS)
        if kept(data, epsilon).exists()
    }
    if not found:
        return []
    heads = [f"{data}, eps {epsilon:g}" for data, epsilon in found]
    return [
        "## Tuning on the private records: DP-KPS",
        "",
        f"`python experiments/tuning_table.py`: accuracy of a classifier that learned from "
        f"{RECORDS:,} sequences, mean and deviation over runs (their number in brackets), each of "
        f"which costs the epsilon of its column. A tuning makes 6.3 runs on average (eta 0, gamma "
        f"{GAMMA}), draws a candidate for each, and releases the best. It costs more than it "
        "gains: the runs pay for their number with more noise, and the defaults are never far "
        "from the best candidate.",
        "",
        "| | " + " | ".join(heads) + " |",
        "|---|" + "---|" * len(heads),
        *(
            f"| {way} | " + " | ".join(spread(figures[way]) for figures in found.values()) + " |"
            for way in WAYS
        ),
    ]


if __name__ == "__main__":
    for one in product(SETS, EPSILONS):
        if not kept(*one).exists():
            measure(*one)
