"""DP-SGD is rehearsed on public records with more and less noise, for results_tables.md: the scores
say from which signal on `dpray plan --compare` calls it enough.

`python experiments/dp_sgd_signal.py` makes the rehearsals that are not there yet, and keeps their
scores in experiments/measured.
"""

from __future__ import annotations

import json
from pathlib import Path

from embedding import Kept
from regret import HERE, RUNS, TEXTS, accuracy, part, question, say

import dpray

DATA = {"agnews": 4, "trec": 6}
"""The data sets, with the number of their labels."""

EPSILONS = (0.05, 0.1, 0.25, 0.5, 1.0, 4.0)


def kept(data: str) -> Path:
    return HERE / "measured" / "dp_sgd_signal" / f"{data}.json"


def measure(data: str) -> None:
    rehearsal = dpray.rehearse(
        question(data, 1.0), part(data, "public"), RUNS / "dp_sgd_signal" / data, say,
        epsilons=EPSILONS, records=TEXTS, methods=["dp_sgd"], load_embedder=lambda name: Kept(),
    )  # fmt: skip
    found = {}
    for epsilon in EPSILONS:
        one = rehearsal.found[epsilon]["dp_sgd"]
        assert one.answer.choice is not None and one.answer.choice.signal is not None
        signal = round(one.answer.choice.signal.value, 1)
        found[f"{epsilon:g}"] = {"signal": signal, "accuracy": accuracy(one.scores)}
    kept(data).parent.mkdir(parents=True, exist_ok=True)
    kept(data).write_text(json.dumps(found, indent=1) + "\n")


def table() -> list[str]:
    """Return the section of the page; empty where nothing was measured."""
    done = {data: json.loads(kept(data).read_text()) for data in DATA if kept(data).exists()}
    if not done:
        return []
    guesses = ", ".join(f"{1 / DATA[data]:.2f} ({data})" for data in done)
    lines = [
        "## How much noise DP-SGD learns through",
        "",
        "`python experiments/dp_sgd_signal.py`: rehearsals as in the section before, of DP-SGD "
        f"alone, with one pass; mean and deviation over bootstraps. A guess is {guesses}. What a "
        "run at epsilon 0.05 teaches can hardly come from the records: the model follows the "
        "control codes by itself.",
        "",
        "| eps | " + " | ".join(f"{data}: q N / sigma | accuracy" for data in done) + " |",
        "|---|" + "---|---|" * len(done),
    ]
    for epsilon in map("{:g}".format, EPSILONS):
        row = [epsilon]
        for cells in done.values():
            score = cells[epsilon]["accuracy"]
            row += [f"{cells[epsilon]['signal']:g}"]
            row += ["" if score is None else f"{score['mean']:.3f} ± {score['deviation']:.3f}"]
        lines.append("| " + " | ".join(row) + " |")
    return lines


if __name__ == "__main__":
    for name in DATA:
        if not kept(name).exists():
            measure(name)
