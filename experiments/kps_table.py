"""DP-KPS for results_small_model.md: every way of the method at the paper's four budgets.

`python experiments/kps_table.py agnews yelp [--texts]` makes the runs that are not there yet: the
sequences alone, and with `--texts` one call of a model for each of fewer sequences, through the
endpoint of `dpray serve experiments/serve.yaml`; and Aug-PE with as many calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from paper_evaluation.network import three_layer_network
from runs import DATA, RUNS, finished, make, released

from dpray.evaluation.downstream import Embedded, logistic_regression

BUDGETS = ((1, 5), (5, 5), (1, 10), (5, 10))
"""eps_voc and eps_kde: Table 2 of the paper."""

PAPER = ("stop_words=keep", "threshold=0", "contrast=0")
RFF = (*PAPER, "estimator=rff")
WAYS = {
    "histogram": (),
    "plain": PAPER,
    "rff": RFF,
    "iterative": (*RFF, "sampling=iterative", "top_m=10"),
}
NAMES = {
    "histogram": "histogram (exact), independent: the defaults",
    "plain": "histogram (exact), independent: nothing after the noise",
    "rff": "RFF, independent (the paper)",
    "iterative": "RFF, iterative, logarithmic, best 10 (the paper)",
}
WITH_TEXTS = ("histogram", "rff", "iterative")
CALLS = 200
"""Of the model, for each run with texts: two cores make some 5 a second."""

ENDPOINT = (
    "engine.kind=openai",
    "engine.model=small",
    "engine.base_url=http://127.0.0.1:8000/v1",
    "engine.api=completions",
    "engine.max_in_flight=128",
)


def folder(data: str, way: str, eps: tuple[int, int], texts: bool) -> Path:
    kind = "texts" if texts else "sequences"
    return RUNS / f"kps_{data}" / f"{way}-{eps[0]}+{eps[1]}-{kind}"


def run(data: str, texts: bool) -> Iterator[str]:
    """Makes what is not there; yields the names of what was made."""
    for eps in BUDGETS:
        for way in WITH_TEXTS if texts else WAYS:
            out = folder(data, way, eps, texts)
            if finished(out):
                continue
            changes = [f"method.{setting}" for setting in WAYS[way]]
            changes += [f"method.epsilon_vocabulary={eps[0]}", f"method.epsilon_kde={eps[1]}"]
            if texts:
                changes += [f"method.records={CALLS}", *ENDPOINT]
            make(f"kps_{data}", out, sum(eps), changes)
            yield out.name


def run_aug_pe(data: str) -> Iterator[str]:
    """Aug-PE with CALLS calls: one a text for the first population and for each iteration."""
    for epsilon in sorted({sum(eps) for eps in BUDGETS}):
        out = aug_pe_folder(data, epsilon)
        if not finished(out):
            changes = [f"method.records={CALLS // 4}", "method.iterations=3"]
            make(f"aug_pe_{data}", out, epsilon, changes)
            yield out.name


def aug_pe_folder(data: str, epsilon: int) -> Path:
    return RUNS / f"kps_{data}" / f"aug_pe-{epsilon}"


def table(data: str, embedded: Callable[[Path], Embedded]) -> list[str]:
    """The section of the page; empty where no run is at hand."""
    if not any(finished(folder(data, "histogram", eps, False)) for eps in BUDGETS):
        return []
    private, test = (embedded(DATA / data / f"{part}.jsonl") for part in ("private", "test"))
    lines = [
        f"## DP-KPS: {data}, {len(private.labels):,} private records",
        "",
        "Accuracy on real test texts of a logistic regression / the paper's 3-layer network / the "
        "network with Deep CORAL, on MiniLM embeddings, trained on what the run released: the "
        "sequences themselves, or one text of the small model for each. Budgets are eps_voc + "
        "eps_kde, delta is 0; Aug-PE has the sum of both at delta > 0, and as many calls.",
        "",
        *words_taken(data),
        "| way | records | " + " | ".join(f"{a} + {b}" for a, b in BUDGETS) + " |",
        "|---|---|" + "---|" * len(BUDGETS),
    ]
    for texts in (False, True):
        what = "texts" if texts else "sequences"
        for way in WITH_TEXTS if texts else WAYS:
            outs = [folder(data, way, eps, texts) for eps in BUDGETS]
            lines += row(f"{NAMES[way]}; {what}", outs, embedded, test)
    outs = [aug_pe_folder(data, sum(eps)) for eps in BUDGETS]
    lines += row(f"Aug-PE, T = 3; {CALLS} calls", outs, embedded, test)
    for size in (CALLS, len(private.labels)):
        some = Embedded(private.vectors[:size], private.labels[:size])
        lines.append(f"| real private records | {size} | {accuracies(some, test)} | | | |")
    return lines


def words_taken(data: str) -> list[str]:
    """How far the model did what it was asked for."""
    out = folder(data, "histogram", BUDGETS[-1], texts=True)
    if not finished(out):
        return []
    records = released(out)
    shares = [
        np.mean([term in record["text"].lower() for term in record["terms"]]) for record in records
    ]
    return [
        f"Of the terms that it was asked for the small model wrote {np.mean(shares):.0%}: the rows "
        "with texts say more of the model than of the method.",
        "",
    ]


def row(
    name: str, outs: list[Path], embedded: Callable[[Path], Embedded], test: Embedded
) -> list[str]:
    if not any(map(finished, outs)):
        return []
    found = [embedded(out / "synthetic.jsonl") if finished(out) else None for out in outs]
    sizes = {len(each.labels) for each in found if each is not None}
    records = " to ".join(str(size) for size in sorted({min(sizes), max(sizes)}))
    cells = ["not run" if each is None else accuracies(each, test) for each in found]
    return [f"| {name} | {records} | " + " | ".join(cells) + " |"]


def accuracies(train: Embedded, test: Embedded) -> str:
    fits: list[Any] = [
        logistic_regression(train),
        three_layer_network(train),
        three_layer_network(train, test.vectors),
    ]
    right = (np.mean(fit.predict(test.vectors) == test.labels) for fit in fits)
    return " / ".join(f"{share:.3f}" for share in right)


if __name__ == "__main__":
    with_texts = "--texts" in sys.argv
    for dataset in (name for name in sys.argv[1:] if not name.startswith("-")):
        for made in run(dataset, with_texts):
            print(made, flush=True)
        if with_texts:
            for made in run_aug_pe(dataset):
                print(made, flush=True)
