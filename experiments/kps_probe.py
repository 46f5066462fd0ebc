"""Where DP-KPS has its quality: classifiers trained on the key phrase sequences, without an LLM.

    python experiments/kps_probe.py [--on validation] [--only A,B] [--sequences N] [--seeds K]

AG News, sequences of L = 10 of N = 1000 terms of S = 10 a record; a logistic regression on MiniLM
embeddings of the sequences, tested on real texts (four classes: chance is 0.25). `--on test`: 4,000
private records, 3,800 test texts. `--on validation`: 3,000 public records play the private ones and
1,000 others the test; the defaults of `DpKpsSettings` were chosen there. Needs ../shared.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dpray.engines.embedder import SentenceTransformerEmbedder
from dpray.evaluation.downstream import Embedded, logistic_regression
from dpray.io.records import read_rows
from dpray.mechanisms.discrete_noise import Counts
from dpray.mechanisms.randomness import generator, new_key
from dpray.mechanisms.term_matcher import TermMatcher
from dpray.methods.dp_kps.algorithm import DensityPass, DpKps, Sequences
from dpray.methods.dp_kps.plan import read_vocabulary
from dpray.methods.dp_kps.settings import DpKpsSettings

DATA = Path("../shared/data")
VOCABULARIES = {
    "words_alpha": DATA / "vocab/words_alpha.txt",
    "unigrams": DATA / "vocab/public_unigrams.tsv",
}
Texts = dict[str, list[str]]


@dataclass(frozen=True)
class Row:
    """One line of the table; `plan` changes the paper's setting with the plain histogram."""

    name: str
    vocabulary: str = "words_alpha"
    stop_words: str = "keep"
    plan: dict[str, Any] = field(default_factory=dict)
    epsilons: tuple[tuple[float, float], ...] = ((1, 5), (5, 10))
    no_noise: bool = False


RFF = {"estimator": "rff", "bandwidth": 1.0}
OURS: dict[str, Any] = {"threshold": 1.0, "contrast": 1.0}
HALVES = ((3.0, 3.0), (7.5, 7.5))
THREE = ((1.0, 5.0), (3.0, 3.0), (5.0, 10.0))
LINEAR = {**RFF, "sampling": "iterative", "ensemble": "linear", "top_m": 10}
LOGARITHMIC = {**LINEAR, "ensemble": "logarithmic"}

ROWS = [
    Row("DP histogram (exact)"),
    Row("the same, no stop words, threshold, contrast", "words_alpha", "english", OURS),
    Row("the same, eps in halves (the defaults)", "words_alpha", "english", OURS, HALVES),
    *(
        Row(f"{name}, {kind} stop words", name, kind, OURS, THREE)
        for name in ("unigrams", "words_alpha")
        for kind in ("english", "keep")
    ),
    Row("unigrams, N = 500", "unigrams", "english", {**OURS, "vocabulary_size": 500}, THREE),
    Row("words_alpha, N = 300", "words_alpha", "english", {**OURS, "vocabulary_size": 300}, THREE),
    Row("histogram, threshold and contrast", plan=OURS),
    Row("histogram, contrast", plan={"contrast": 1.0}),
    Row("histogram, threshold", plan={"threshold": 1.0}),
    Row("histogram without noise", no_noise=True),
    Row("DP histogram, unigrams", "unigrams"),
    Row("RFF, I = 200, bandwidth 1", plan={**RFF, "features": 200}),
    Row("RFF, I = 1000, bandwidth 1", plan=RFF),
    Row("RFF, I = 1000, bandwidth 0.5", plan={**RFF, "bandwidth": 0.5}),
    Row("RFF, I = 1000, bandwidth 1, Gaussian", plan={**RFF, "noise": "gaussian", "delta": 1e-6}),
    Row("RFF, bandwidth 1, contrast", plan={**RFF, "contrast": 1.0}),
    Row("RFF, iterative, linear", plan=LINEAR),
    Row("RFF, iterative, logarithmic", plan=LOGARITHMIC),
    Row("RFF, iterative, logarithmic, contrast", plan={**LOGARITHMIC, "contrast": 1.0}),
]


@cache
def embedder() -> SentenceTransformerEmbedder:
    return SentenceTransformerEmbedder()


def embed(texts: list[str]) -> np.ndarray:
    return embedder().embed(texts)


@cache
def data(on: str) -> tuple[Texts, Embedded]:
    """The private texts by label, and the embedded test."""

    def rows(name: str) -> list[dict[str, Any]]:
        return [row for _, row in read_rows(str(DATA / "agnews" / f"{name}.jsonl"))]

    if on == "test":
        private, test = rows("private"), rows("test")
    else:
        public = rows("public")
        random.Random(0).shuffle(public)
        private, test = public[:3000], public[3000:]
    by_label: Texts = {}
    for row in private:
        by_label.setdefault(row["label"], []).append(row["text"])
    labels = np.array([row["label"] for row in test])
    return by_label, Embedded(embed([row["text"] for row in test]), labels)


def settings(**changes: Any) -> DpKpsSettings:
    """Settings without the threshold and the contrast, as in the paper."""
    paper = {"vocabulary": "", "threshold": 0.0, "contrast": 0.0}
    return DpKpsSettings.model_validate({"name": "dp_kps"} | paper | changes)


@cache
def public_side(name: str, stop_words: str) -> tuple[TermMatcher, list[str]]:
    terms = read_vocabulary(VOCABULARIES[name], stop_words)
    return TermMatcher(terms), terms


@cache
def counts_of(name: str, stop_words: str, on: str, S: int) -> Counts:
    matcher, terms = public_side(name, stop_words)
    plan = DpKps(settings(phrases_per_record=S), ("",), len(terms), 1, 1.0, 1.0)
    texts = [text for found in data(on)[0].values() for text in found]
    return plan.vocabulary_counts(matcher, texts)


@cache
def vocabulary(
    name: str, stop_words: str, on: str, S: int, N: int, epsilon: float, seed: int
) -> tuple[list[str], np.ndarray]:
    """The private terms and their embeddings; rows of one seed share the draw."""
    counts_V = counts_of(name, stop_words, on, S)
    _, terms = public_side(name, stop_words)
    wanted = settings(phrases_per_record=S, vocabulary_size=N)
    plan = DpKps(wanted, ("",), len(terms), 1, epsilon, 1.0)
    chosen = [terms[i] for i in plan.noisy_vocabulary(counts_V, generator(new_key()))]
    return chosen, embed(chosen)


def accuracy(row: Row, eps: tuple[float, float], on: str, sequences: int, seed: int) -> float:
    private, test = data(on)
    plan = DpKps(
        settings(**row.plan),
        labels=tuple(sorted(private)),
        public_terms=len(public_side(row.vocabulary, row.stop_words)[1]),
        dimension=384,
        epsilon_vocabulary=eps[0],
        epsilon_kde=eps[1],
    )
    S, N = plan.settings.phrases_per_record, plan.settings.vocabulary_size
    terms, vectors = vocabulary(row.vocabulary, row.stop_words, on, S, N, eps[0], seed)
    density_pass, rng = DensityPass(plan, terms, vectors), generator(new_key())
    sums = {label: density_pass.sums(texts) for label, texts in private.items()}
    if not row.no_noise:
        sums = {label: plan.noisy_sums(found) for label, found in sums.items()}
    draws = Sequences(plan, vectors, sums)
    texts, labels = [], []
    for label in plan.labels:
        for ids in draws.draw(label, sequences, rng):
            texts.append(" ".join(terms[i] for i in ids))
            labels.append(label)
    fitted = logistic_regression(Embedded(embed(texts), np.array(labels)))
    return float((fitted.predict(test.vectors) == test.labels).mean())


def lines(rows: list[Row], on: str, sequences: int, seeds: int) -> Iterator[str]:
    yield "| density per class | eps_voc + eps_kde: accuracy | |"
    yield "|---|---|---|"
    for row in rows:
        cells = []
        for eps in row.epsilons:
            found = [accuracy(row, eps, on, sequences, seed) for seed in range(seeds)]
            spread = f" ± {np.std(found):.3f}" if seeds > 1 else ""
            cells.append(f"{eps[0]:g} + {eps[1]:g}: {np.mean(found):.3f}{spread}")
        yield f"| {row.name} | " + " | ".join(cells) + " |"


def main(
    on: Literal["test", "validation"] = "test",
    only: str = "",
    sequences: int = 1000,
    seeds: int = 1,
) -> None:
    wanted = [row for row in ROWS if any(text in row.name for text in only.split(","))]
    for line in lines(wanted, on, sequences, seeds):
        print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
