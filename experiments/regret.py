"""The choice of a rehearsal beside the private runs of every method, for results_tables.md.

`python experiments/regret.py [EPSILON...]` rehearses every method on public records of each data
set, makes the same runs on the private ones, and keeps the scores of both in experiments/measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import log
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
from embedding import Kept
from runs import DATA, HERE, RUNS, finished, released, rows
from scipy.stats import spearmanr

import dpray
from dpray.config.config import Config
from dpray.evaluation.compare import METHODS
from dpray.evaluation.evaluate import Judge
from dpray.evaluation.rehearse import FEWEST, Rehearsal, on_stand_in, weighed, within_chance
from dpray.methods.config import load_config, parse_config
from dpray.types import InputError

SETS = {"agnews": "News Type", "trec": "Answer", "yelp": "Category", "banking77": "Question about",
        "wikimovies": "Genre"}  # fmt: skip
"""The control codes of DP-SGD call a set's label so."""

EPSILONS = (4.0, 1.0, 8.0, 2.0)
TEXTS = 100

SIZES = {"private": 2000, "public": 1400, "test": 700}
"""Records of each part, drawn once."""

WORDS = 20
"""So many words of a text are looked at, about as many as the model may write."""

TARGET, CORRELATION = 0.02, 0.8
"""A choice is good whose regret is at most so much, and a rehearsal that ranks methods so well."""

TRAIN = 300
"""Private records that MAUVE and the Fréchet distance are compared with."""

LEGEND = f"""\
`python experiments/regret.py`; settings in experiments/regret.yaml, with the model of 12.5 M
parameters in bfloat16. Every method was rehearsed on public records and then run once, with the
same settings, on private ones: {TEXTS} texts of {SIZES["private"]:,} private records of each set,
where half of {SIZES["public"]:,} public ones stood for these, all drawn once and cut to {WORDS}
words. A cell is the accuracy in the rehearsal, and then that of the private run on
{SIZES["test"]} test records (trec has 500), by the same score: a logistic regression on MiniLM
embeddings, the mean of five bootstraps. Labels are equally frequent in a release. Choice: the best
in the rehearsal, where a method below its noise has to be better by more than its deviation.
Regret: how much less accurate it is, on the private records, than the best method there. Rank
correlation: Spearman's, of the two figures of the methods, of which there are four at most.
"""


@cache
def part(data: str, name: str) -> Path:
    """Write the records of a part that are looked at; return the file."""
    found = [
        {"text": " ".join(row["text"].split()[:WORDS]), "label": row["label"]}
        for row in rows(DATA / data / f"{name}.jsonl")
    ]
    places = np.random.default_rng(0).permutation(len(found))[: SIZES[name]]
    path = RUNS / "regret" / data / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(found[place]) + "\n" for place in places))
    return path


@cache
def labels(data: str) -> list[str]:
    """Return the labels of all public records."""
    return sorted({str(row["label"]) for row in rows(DATA / data / "public.jsonl")})


def question(data: str, epsilon: float) -> Config:
    records = len(rows(part(data, "private")))
    changes = [
        f"data.path={part(data, 'private')}",
        f"data.public_size={records}",
        f"data.labels={json.dumps(labels(data))}",
        f"privacy.epsilon={epsilon:g}",
        f"privacy.delta={1 / (records * log(records)):.1e}",
        f"method.dp_sgd.control_columns.label={SETS[data]}",
    ]
    return load_config(HERE / "regret.yaml", changes)


def measure(data: str, epsilon: float) -> None:
    """Rehearse, run on the private records, and write the scores to a file that is kept."""
    config = question(data, epsilon)
    rehearsal = dpray.rehearse(
        config, part(data, "public"), RUNS / "regret" / data / "rehearsal", say,
        epsilons=[epsilon], records=TEXTS, methods=METHODS, load_embedder=lambda name: Kept(),
    )  # fmt: skip
    private, test = (rows(part(data, name)) for name in ("private", "test"))
    judge = Judge(Kept(), private[:TRAIN], test, labelled=True)
    found = {
        "real": {
            "rehearsed": accuracy(rehearsal.real),
            "private": accuracy(judge.scores(private[-TEXTS:])),
        }
    }
    for name in METHODS:
        found[name] = figures(config, rehearsal, epsilon, name, judge)
        say(f"{data} eps {epsilon:g}, {name}: {found[name]}")
    kept(data, epsilon).parent.mkdir(parents=True, exist_ok=True)
    kept(data, epsilon).write_text(json.dumps(found, indent=1) + "\n")


def figures(
    config: Config, rehearsal: Rehearsal, epsilon: float, name: str, judge: Judge
) -> dict[str, Any]:
    """Return a method's accuracy in the rehearsal and in the same run on the private records; None
    where there is no run."""
    one = rehearsal.found[epsilon][name]
    about = {"is_enough": one.answer.is_enough, "why_not": one.why_not}
    found = about | {"rehearsed": accuracy(one.scores), "private": None}
    if one.answer.choice is not None:
        folder = Path(config.data.path).parent / "private" / f"{name}-eps{epsilon:g}"
        asked = on_stand_in(config, one.answer.chosen_method(), Path(config.data.path), folder)
        try:
            if not finished(folder):
                dpray.run(parse_config(asked))
            if len(made := released(folder)) >= FEWEST:
                found["private"] = accuracy(judge.scores(made))
        except InputError as error:
            found["why_not"] = str(error)
    return found


def accuracy(scores: Mapping[str, Any] | None) -> dict[str, float] | None:
    if scores is None:
        return None
    return {name: round(value, 4) for name, value in scores["accuracy"].items()}


def kept(data: str, epsilon: float) -> Path:
    return HERE / "measured" / "regret" / f"{data}-eps{epsilon:g}.json"


def say(what: object) -> None:
    print(f"{process_time():.0f} s", what, flush=True)


Cell = dict[str, dict[str, Any]]
"""A cell holds what is kept of a data set at one epsilon."""


def accuracies(cell: Cell, when: str) -> dict[str, float]:
    """Return the mean accuracy of each method that was `rehearsed`, or run on the `private`
    records."""
    return {name: cell[name][when]["mean"] for name in METHODS if cell[name][when] is not None}


def choice(cell: Cell) -> str | None:
    """Return the best method of the rehearsal, as `Rehearsal.best` does."""
    worth = {
        name: weighed(mean, cell[name]["rehearsed"]["deviation"], cell[name]["is_enough"])
        for name, mean in accuracies(cell, "rehearsed").items()
    }
    return max(worth, key=worth.__getitem__, default=None)


def as_good(cell: Cell) -> list[str]:
    """Return the methods within chance of the choice, as `Rehearsal.as_good` does."""
    if (best := choice(cell)) is None:
        return []
    scores = {name: cell[name]["rehearsed"] for name in accuracies(cell, "rehearsed")}
    return within_chance(scores, best)


def regret(cell: Cell, name: str | None) -> float | None:
    """Return how far the method's accuracy on the private records is below that of the best one;
    None where it was not run."""
    found = accuracies(cell, "private")
    return max(found.values()) - found[name] if name in found else None


def least_regret(cell: Cell, names: Iterable[str | None]) -> float | None:
    found = [value for name in names if (value := regret(cell, name)) is not None]
    return min(found, default=None)


def correlation(cell: Cell) -> float | None:
    """Return Spearman's, of the methods' accuracies in the rehearsal and on the private records;
    None where there are fewer than three methods, or one of the two is the same for all."""
    before, after = (accuracies(cell, when) for when in ("rehearsed", "private"))
    both = [name for name in before if name in after]
    pairs = [[side[name] for name in both] for side in (before, after)]
    if len(both) < 3 or any(len(set(side)) == 1 for side in pairs):
        return None
    return float(spearmanr(*pairs).statistic)


WAYS: dict[str, Callable[[Cell], str | None]] = {
    "the rehearsal's choice": choice,
    "always Aug-PE": lambda cell: "aug_pe",
    "always DP-SGD": lambda cell: "dp_sgd",
}


def table() -> list[str]:
    """Return the section of the page; empty where nothing was measured."""
    cells = {
        (data, epsilon): json.loads(kept(data, epsilon).read_text())
        for epsilon in sorted(EPSILONS)
        for data in SETS
        if kept(data, epsilon).exists()
    }
    if not cells:
        return []
    lines = [
        "## The choice of a rehearsal",
        "",
        " ".join(LEGEND.split()),
        "",
        f"| data | eps | {' | '.join(METHODS)} | real records | choice | within chance of it "
        "| regret | always Aug-PE | always DP-SGD | rank correlation |",
        "|" + "---|" * (len(METHODS) + 9),
    ]
    for (data, epsilon), cell in cells.items():
        figures = [*(both(cell, name) for name in METHODS), both(cell, "real")]
        regrets = [number(regret(cell, way(cell))) for way in WAYS.values()]
        row = [
            data,
            f"{epsilon:g}",
            *figures,
            choice(cell) or "none",
            ", ".join(as_good(cell)),
            *regrets,
        ]
        lines.append("| " + " | ".join([*row, number(correlation(cell))]) + " |")
    return [*lines, "", *summary(cells)]


def both(cell: Cell, name: str) -> str:
    about = cell[name]
    means = [about[when] and about[when]["mean"] for when in ("rehearsed", "private")]
    mark = "" if about.get("is_enough", True) else " (below its noise)"
    return f"{number(means[0])}, {number(means[1])}{mark}"


def number(value: float | None) -> str:
    return "not run" if value is None else f"{value:.3f}"


def summary(cells: Mapping[tuple[str, float], Cell]) -> list[str]:
    """Return the regrets of each way over all cells, the correlations, and the choice of one set's
    rehearsal for another set."""
    lines = ["| way | cells | mean regret | largest | at most 0.02 in |", "|---|---|---|---|---|"]

    def row(name: str, regrets: Sequence[float | None]) -> str:
        found = [value for value in regrets if value is not None]
        if not found:
            return f"| {name} | 0 | | | |"
        few = sum(value <= TARGET for value in found)
        return f"| {name} | {len(found)} | {np.mean(found):.3f} | {max(found):.3f} | {few} |"

    for name, way in WAYS.items():
        lines.append(row(name, [regret(cell, way(cell)) for cell in cells.values()]))
    lines.append(
        row(
            "the choice or one within chance of it, the best by the private figures",
            [least_regret(cell, (choice(cell), *as_good(cell))) for cell in cells.values()],
        )
    )
    across = [
        regret(cells["agnews", epsilon], choice(cells["yelp", epsilon]))
        for epsilon in EPSILONS
        if ("agnews", epsilon) in cells and ("yelp", epsilon) in cells
    ]
    lines.append(row("rehearsed on yelp, run on agnews", across))
    found = [value for cell in cells.values() if (value := correlation(cell)) is not None]
    at_least = sum(round(value, 6) >= CORRELATION for value in found)
    lines += [
        "",
        f"Rank correlation: mean {np.mean(found):.2f}, at least {CORRELATION} in {at_least} of "
        f"{len(found)}.",
    ]
    return lines


def main(epsilons: Sequence[float]) -> None:
    for epsilon in epsilons:
        for data in SETS:
            if not kept(data, epsilon).exists():
                measure(data, epsilon)


if __name__ == "__main__":
    main([float(name) for name in sys.argv[1:]] or EPSILONS)
