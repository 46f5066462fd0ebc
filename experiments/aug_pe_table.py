"""Aug-PE for results_small_model.md: does the selection move towards the private data?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from runs import DATA, HERE, RUNS

from dpray.evaluation.downstream import Embedded, logistic_regression
from dpray.evaluation.fidelity import frechet_distance
from dpray.methods.aug_pe.algorithm import Checkpoint, Population
from dpray.methods.config import load_config
from dpray.methods.registry import make_plan

COUNTS = (0, 1, 5, 10)
"""Iterations; 0: as many texts of the first population, which owes nothing to private data."""

ACCURACY = (
    " Accuracy: a logistic regression trained on the kept texts, tested on the real test texts."
)


def table(
    name: str,
    runs: list[tuple[str, dict[str, Any]]],
    embedded: Callable[[Path], Embedded],
    embedder: Any,
) -> list[str]:
    test, private = (embedded(DATA / name / f"{part}.jsonl") for part in ("test", "private"))
    labelled = len(set(test.labels)) > 1
    size, method = runs[0][1]["records"], runs[0][1]["method"]
    made = f"n_syn {size}, T = {method['iterations']}, L = {method['variations']}"
    lines = [
        f"## Aug-PE: {name}, {len(private.vectors):,} private records, {made}",
        "",
        "The noise is calibrated for all iterations. Distance: Fréchet distance of MiniLM "
        "embeddings to "
        f"{size} real test texts (mean of 5 draws), by the number of iterations; 0 are texts of "
        "the first population." + ACCURACY * labelled,
        "",
        "| eps | noise multiplier | calls | words (10 %, median, 90 %) "
        "| distance at 0 | 1 | 5 | 10 | accuracy at 0 | at 10 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run, report in runs:
        kept = kept_sets(run)
        vectors = {t: embedder.embed(texts(kept[t])) for t in COUNTS}
        words = report["iterations"][-1]["words"]
        accuracies = ["", ""]
        if labelled:
            accuracies = [f"{accuracy(kept[t], vectors[t], test):.3f}" for t in (0, 10)]
        cells = [
            "inf (no noise)" if report["epsilon"] is None else f"{report['epsilon']:.3f}",
            f"{report['noise_multiplier']:.3f}",
            f"{report['calls']['calls']:,}",
            ", ".join(f"{words[q]:.0f}" for q in ("0.1", "0.5", "0.9")),
            *(f"{distance(vectors[t], test.vectors, size):.3f}" for t in COUNTS),
            *accuracies,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    real = distance(private.vectors[:size], test.vectors, size)
    ceiling = ""
    if labelled:
        some = Embedded(private.vectors[:size], private.labels[:size])
        ceiling = (
            f"{float(np.mean(logistic_regression(some).predict(test.vectors) == test.labels)):.3f}"
        )
    lines.append(f"| {size} real private records | | | | | | | {real:.3f} | | {ceiling} |")
    return lines


def kept_sets(run: str) -> dict[int, Population]:
    """The kept texts after each of COUNTS iterations, from what the votes gave."""
    folder = RUNS / run
    epsilon = run.partition("@")[2].replace("inf", ".inf")
    config = load_config(HERE / f"{run.partition('@')[0]}.yaml", [f"privacy.epsilon={epsilon}"])
    plan: Any = make_plan(config)
    salt = json.loads((folder / "run.json").read_text())["salt"]
    kept: dict[int, Population] = {}
    for t in COUNTS[1:]:
        path = folder / "private" / "parts" / f"votes-{t:04d}.json"
        checkpoint = Checkpoint(**json.loads(path.read_text()))
        kept[t] = plan.method.kept(checkpoint, salt)
        if t == 1:
            wanted = plan.method.records
            kept[0] = {label: s[: wanted[label]] for label, s in checkpoint.population.items()}
    return kept


def texts(population: Population) -> list[str]:
    return [text for of_label in population.values() for text in of_label]


def accuracy(population: Population, vectors: np.ndarray, test: Embedded) -> float:
    labels = np.array([label for label, of_label in population.items() for _ in of_label])
    classifier = logistic_regression(Embedded(vectors, labels))
    return float(np.mean(classifier.predict(test.vectors) == test.labels))


def distance(x: np.ndarray, real: np.ndarray, size: int) -> float:
    draws = [
        np.random.default_rng(seed).choice(len(real), size, replace=False) for seed in range(5)
    ]
    return float(np.mean([frechet_distance(x, real[rows]) for rows in draws]))
