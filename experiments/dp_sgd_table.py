"""DP-SGD for results_small_model.md: LoRA and all weights at eps 4, 8 and without noise, and
canaries.

`python experiments/dp_sgd_table.py agnews yelp` makes the runs that are not there yet, with
`--canaries` those of `dpray audit --canaries` too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import islice
from math import exp, inf
from pathlib import Path

import numpy as np
from runs import CANDIDATES, DATA, HERE, RUNS, accuracy, audit_canaries, finished, make

from dpray.evaluation.downstream import Embedded
from dpray.io.records import read_rows
from dpray.methods.config import load_config
from dpray.methods.dp_sgd.audit import released_losses
from dpray.methods.dp_sgd.settings import DpSgdSettings
from dpray.runs.folder import MODEL

EPSILONS = (4.0, 8.0, inf)
LEARNING_RATES = {"lora": 4e-3, "full": 1e-3}
NAMES = {"lora": "LoRA, rank 8", "full": "all weights"}
CANARIES = {"lora": (8.0, inf)}
BASE = Path("../shared/models/publm-12m")
ASKED = 400
"""Real test texts of which the perplexity is taken."""


def folder(data: str, tuning: str, epsilon: float) -> Path:
    return RUNS / f"dp_sgd_{data}" / f"{tuning}-{epsilon:g}"


def changes(tuning: str) -> list[str]:
    return [f"method.tuning={tuning}", f"method.learning_rate={LEARNING_RATES[tuning]}"]


def run(data: str) -> None:
    for epsilon in EPSILONS:
        for tuning in NAMES:
            if not finished(out := folder(data, tuning, epsilon)):
                make(f"dp_sgd_{data}", out, epsilon, changes(tuning))


def canaries_file(data: str, tuning: str, epsilon: float) -> Path:
    return RUNS / f"dp_sgd_{data}" / f"canaries-{tuning}-{epsilon:g}.json"


def run_canaries(data: str) -> None:
    for tuning, epsilons in CANARIES.items():
        for epsilon in epsilons:
            if not (out := canaries_file(data, tuning, epsilon)).exists():
                audit_canaries(f"dp_sgd_{data}", out, epsilon, changes(tuning))


def table(data: str, embedded: Callable[[Path], Embedded]) -> list[str]:
    """The section of the page; empty where no run is at hand."""
    outs = {(t, e): folder(data, t, e) for t in NAMES for e in EPSILONS}
    done = {key: out for key, out in outs.items() if finished(out)}
    if not done:
        return []
    private, test = (embedded(DATA / data / f"{part}.jsonl") for part in ("private", "test"))
    method = load_config(HERE / f"dp_sgd_{data}.yaml", []).method
    assert isinstance(method, DpSgdSettings)
    lines = [
        f"## DP-SGD: {data}, {len(private.labels):,} private records",
        "",
        f"{method.epochs:g} epoch, B = {method.batch_size}, {method.records} texts. Accuracy: a "
        "logistic regression on MiniLM embeddings, trained on what the tuned model wrote, tested "
        f"on real test texts. Perplexity: of the tuned model on {ASKED} real test texts after "
        "their control codes, by the token. Words: mean of the texts.",
        "",
        "| tuning | eps | noise multiplier | accuracy | words | perplexity |",
        "|---|---|---|---|---|---|",
    ]
    for (tuning, _), out in done.items():
        report = json.loads((out / "privacy_report.json").read_text())
        name = "inf (no noise)" if report["epsilon"] is None else f"{report['epsilon']:.2f}"
        cells = [
            NAMES[tuning],
            name,
            f"{report['noise_multiplier']:.3f}" if report["epsilon"] else "0",
            f"{accuracy(embedded(out / 'synthetic.jsonl'), test):.3f}",
            f"{words(out / 'synthetic.jsonl'):.0f}",
            f"{perplexity(data, tuning, out / MODEL):.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    some = Embedded(private.vectors[: method.records], private.labels[: method.records])
    real = f"{words(DATA / data / 'private.jsonl'):.0f}"
    lines.append(f"| {method.records} real records | | | {accuracy(some, test):.3f} | {real} | |")
    lines.append(f"| the model as it was | | | | | {perplexity(data, 'full', BASE):.1f} |")
    return [*lines, *canaries(data)]


def canaries(data: str) -> list[str]:
    done = [
        (tuning, epsilon, canaries_file(data, tuning, epsilon))
        for tuning, epsilons in CANARIES.items()
        for epsilon in epsilons
        if canaries_file(data, tuning, epsilon).exists()
    ]
    lines = [
        "",
        "Canaries (`dpray audit --canaries`): five made-up secrets for each number of repetitions; "
        f"rank and exposure among {CANDIDATES:,} look-alikes and itself (by chance "
        f"{CANDIDATES // 2 + 1:,} and 1.4 bits).",
        "",
        "| tuning | eps | repetitions | median rank | mean exposure, bits | secrets leaked |",
        "|---|---|---|---|---|---|",
    ]
    for tuning, epsilon, file in done:
        secrets = json.loads(file.read_text())["canaries"]["secrets"]
        for times in sorted({secret["repetitions"] for secret in secrets}):
            group = [secret for secret in secrets if secret["repetitions"] == times]
            cells = [
                NAMES[tuning],
                f"{epsilon:g}",
                f"{times}",
                f"{np.median([secret['rank'] for secret in group]):,.0f}",
                f"{np.mean([secret['exposure'] for secret in group]):.2f}",
                f"{sum(secret['leaks'] > 0 for secret in group)} of {len(group)}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return lines if done else []


def words(path: Path) -> float:
    return float(np.mean([len(row["text"].split()) for _, row in read_rows(str(path))]))


def perplexity(data: str, tuning: str, folder: Path) -> float:
    """The exponential of the mean over texts of a text's mean loss a token."""
    settings = [f"data.path={DATA}/{data}/test.jsonl", *changes(tuning)]
    config = load_config(HERE / f"dp_sgd_{data}.yaml", settings)
    method = config.method
    assert isinstance(method, DpSgdSettings)
    losses_of = released_losses(config, method, folder)
    losses = []
    for _, row in islice(read_rows(config.data.path), ASKED):
        values = {column: str(row[column]) for column in method.control_columns}
        losses += losses_of([row["text"]], values)
    return exp(float(np.mean(losses)))


if __name__ == "__main__":
    for name in (name for name in sys.argv[1:] if not name.startswith("-")):
        run(name)
        if "--canaries" in sys.argv:
            run_canaries(name)
