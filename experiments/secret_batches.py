"""Private prediction with disjoint and with Poisson batches, for results_small_model.md: texts
and what they are worth at eps 1, 2, 4 and 8, with the same s, c, tau and length, so that a text
costs the same compute.

`python experiments/secret_batches.py` makes the runs that are not there yet, the first run of every
cell before the second of any. A run makes `MOST` texts at most: what else its epsilon affords is
what `dpray plan` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from reproduction import Sets, bootstraps, distance, draw, spread
from runs import DATA, HERE, RUNS, accuracy, finished, make

from dpray import plan
from dpray.evaluation.downstream import Embedded
from dpray.methods.config import load_config

EPSILONS = (1.0, 2.0, 4.0, 8.0)
KINDS = ("disjoint", "poisson")
RUNS_OF_EACH = 3
MOST = 200
FILE = "agnews_secret"


def folder(kind: str, epsilon: float, number: int) -> Path:
    return RUNS / "secret_batches" / f"{kind}-{epsilon:g}-{number}"


def run() -> None:
    for number in range(RUNS_OF_EACH):
        for epsilon in EPSILONS:
            for kind in KINDS:
                if not finished(out := folder(kind, epsilon, number)):
                    changes = [f"method.batches={kind}", f"method.max_records={MOST}"]
                    make(FILE, out, epsilon, changes)


@cache
def affordable(epsilon: float) -> Mapping[str, int]:
    """The whole texts that epsilon pays for, by the kind of batches."""
    changes = ["method.batches=auto", f"privacy.epsilon={epsilon:g}", "method.max_records=null"]
    summary = plan(load_config(HERE / f"{FILE}.yaml", changes)).summary()
    return dict(summary["affordable_texts"])


def table(embedded: Callable[[Path], Embedded]) -> list[str]:
    """The section of the page; empty where no run is at hand."""
    found: dict[tuple[str, float], Sets] = {
        (kind, epsilon): [
            embedded(out / "synthetic.jsonl")
            for number in range(RUNS_OF_EACH)
            if finished(out := folder(kind, epsilon, number))
        ]
        for kind in KINDS
        for epsilon in EPSILONS
    }
    if not any(found.values()):
        return []
    private, test = (embedded(DATA / "agnews" / f"{part}.jsonl") for part in ("private", "test"))
    lines = [
        f"## Secret batches: agnews, {len(private.labels):,} private records",
        "",
        f"Texts: whole ones that epsilon pays for (`dpray plan`). Of these a run made {MOST} at "
        "most, which accuracy and distance look at (mean and deviation over runs, their number in "
        f"brackets), as in the tables above. Both kinds by experiments/{FILE}.yaml, so that a text "
        "costs the same compute.",
        "",
        "| batches | eps | texts | made | accuracy | distance |",
        "|---|---|---|---|---|---|",
    ]
    for (kind, epsilon), sets in found.items():
        made = " to ".join(f"{size}" for size in sizes(sets)) or "not run"
        figures = [f"{affordable(epsilon)[kind]:,}", made, *measured(sets, test)]
        lines.append(f"| {kind} | {epsilon:g} | " + " | ".join(figures) + " |")
    few = [draw(private, MOST, seed) for seed in range(RUNS_OF_EACH)]
    for name, sets in ((f"{MOST} real records", few), ("all real records", bootstraps(private))):
        lines.append(f"| {name} | | | | " + " | ".join(measured(sets, test)) + " |")
    return lines


def sizes(sets: Sequence[Embedded]) -> list[int]:
    counts = [len(each.labels) for each in sets]
    return sorted({min(counts), max(counts)}) if counts else []


def measured(sets: Sequence[Embedded], test: Embedded) -> list[str]:
    """Accuracy and distance of the sets that have texts."""
    made = [each for each in sets if len(each.labels)]
    if sets and not made:
        return ["no text", "no text"]
    return [spread([measure(each, test) for each in made]) for measure in (accuracy, distance)]


if __name__ == "__main__":
    run()
