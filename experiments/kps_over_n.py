"""DP-KPS's sequences over the number of records: from which n on the paper's Fourier features
carry, for docs/results.md.

`python experiments/kps_over_n.py` draws the sequences that are not there yet, scores them, and
keeps the accuracies in experiments/measured/kps_over_n. The records are AG News' 1,000 private ones
a class. For a larger n their exact sums are multiplied, as n records of the same mixture have them,
and get the noise of one run: it does not depend on n. No language model: a logistic regression on
embeddings of the sequences is tested on real texts.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from embedding import embed, embedded, embedder
from four_methods_picture import INK, MUTED, picture
from runs import DATA, HERE, accuracy, rows

from dpray.evaluation.downstream import Embedded
from dpray.io.files import write_durably
from dpray.mechanisms.term_matcher import TermMatcher
from dpray.methods.dp_kps.algorithm import DensityPass, DpKps, Sequences
from dpray.methods.dp_kps.plan import read_vocabulary, stop_words
from dpray.methods.dp_kps.settings import DpKpsSettings

VOCABULARY = DATA / "vocab" / "public_unigrams.tsv"
EPSILON_VOCABULARY, EPSILON_KDE = 1.0, 5.0
SEQUENCES = 250
"""Sequences a class."""

SIZES, SEEDS = (1_000, 2_000, 10_000, 40_000), 3
"""Records a class, and runs of each; the paper's private DBPedia-14 has 40,000 records a class."""

PAPER_KEYS = {
    "phrases_per_record": 10,
    "estimator": "rff", "sampling": "iterative", "ensemble": "logarithmic", "top_m": 10,
    "threshold": 0.0, "contrast": 0.0, "stop_words": "keep",
}  # fmt: skip
INDEPENDENT = PAPER_KEYS | {"sampling": "independent", "top_m": None}


class Way(NamedTuple):
    title: str
    keys: Mapping[str, object]
    color: str
    marker: str
    terms: int | None = None
    """The most terms of a record that enter its density; None: the first S."""


WAYS = {
    "paper": Way("paper: iterative", PAPER_KEYS, INK, "o"),
    "independent": Way("paper: independent", INDEPENDENT, INK, "s"),
    "all_terms": Way("independent, all terms", INDEPENDENT, MUTED, "s", terms=1_000),
    "no_stop_words": Way(
        "iterative, no stop words", PAPER_KEYS | {"stop_words": "english"}, "#b5651d", "o"
    ),
    "contrast": Way(
        "the same, contrast 1",
        PAPER_KEYS | {"stop_words": "english", "contrast": 1.0},
        "#6a3d9a",
        "o",
    ),
    "exact": Way("defaults (exact)", {}, "#2e7d32", "D"),
}
REAL = "real terms"
KEPT = HERE / "measured" / "kps_over_n" / "agnews.json"
PICTURE = HERE.parent / "docs" / "results_kps_over_n.svg"


def method_of(way: Way, labels: Sequence[str]) -> tuple[DpKps, list[str]]:
    settings = DpKpsSettings(name="dp_kps", vocabulary=str(VOCABULARY), **way.keys)
    terms_V = [*read_vocabulary(VOCABULARY, stop_words(settings.stop_words, None))]
    method = DpKps(settings, tuple(labels), len(terms_V), 0, EPSILON_VOCABULARY, EPSILON_KDE)
    return method, terms_V


def sequences(
    way: Way, texts: Mapping[str, list[str]], sizes: Sequence[int], seed: int
) -> Iterator[tuple[int, dict[str, list[str]]]]:
    """Yield n and each class's sequences, in words, for each n of `sizes`."""
    method, terms_V = method_of(way, [*texts])
    matcher = TermMatcher(terms_V)
    counts_V = method.vocabulary_counts(matcher, chain.from_iterable(texts.values()))
    have = len(next(iter(texts.values())))
    for n in sizes:
        rng = np.random.default_rng([seed, n])
        chosen = method.noisy_vocabulary(counts_V * (n // have), rng)
        terms_N = [terms_V[i] for i in chosen]
        vectors_ND = embed(terms_N)
        of_n = replace(method, public_terms=len(terms_N), dimension=vectors_ND.shape[1])
        passed = of_n
        if way.terms:  # the sum of an average has the same sensitivity for any number of terms
            more = of_n.settings.model_copy(update={"phrases_per_record": way.terms})
            passed = replace(of_n, settings=more)
        density = DensityPass(passed, terms_N, vectors_ND)
        noisy = {
            label: of_n.noisy_sums(density.sums(some) * (n // have))
            for label, some in texts.items()
        }
        drawn = Sequences(of_n, vectors_ND, noisy)
        yield (
            n,
            {
                label: [
                    " ".join(terms_N[i] for i in ids) for ids in drawn.draw(label, SEQUENCES, rng)
                ]
                for label in texts
            },
        )


def real_sequences(texts: Mapping[str, list[str]], seed: int) -> dict[str, list[str]]:
    """Return the first 10 terms of records, without stop words: what no noise would leave."""
    method, terms_V = method_of(WAYS["exact"], [*texts])
    matcher, rng = TermMatcher(terms_V), np.random.default_rng(seed)
    L = method.settings.sequence_length
    return {
        label: [
            " ".join(terms_V[i] for i in matcher.first_terms(some[row], L))
            for row in rng.permutation(len(some))[:SEQUENCES]
        ]
        for label, some in texts.items()
    }


def score(made: Mapping[str, list[str]], test: Embedded) -> float:
    labels = np.array([label for label, some in made.items() for _ in some])
    vectors = embedder().embed([text for some in made.values() for text in some])
    return round(accuracy(Embedded(vectors, labels), test), 4)


def main() -> None:
    texts: defaultdict[str, list[str]] = defaultdict(list)
    for row in rows(DATA / "agnews" / "private.jsonl"):
        texts[row["label"]].append(row["text"])
    test = embedded(DATA / "agnews" / "test.jsonl")
    found = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for seed in range(SEEDS):
        found.setdefault(REAL, {}).setdefault(str(seed), None)
        if found[REAL][str(seed)] is None:
            found[REAL][str(seed)] = score(real_sequences(texts, seed), test)
        for name, way in WAYS.items():
            of_way = found.setdefault(name, {})
            left = [n for n in SIZES if f"{n}-{seed}" not in of_way]
            for n, made in sequences(way, texts, left, seed):
                of_way[f"{n}-{seed}"] = score(made, test)
                print(name, n, seed, of_way[f"{n}-{seed}"], flush=True)
                KEPT.parent.mkdir(parents=True, exist_ok=True)
                write_durably(KEPT, json.dumps(found, indent=1) + "\n")


def draw(found: Mapping[str, Mapping[str, float]]) -> None:
    with picture(PICTURE, 6.5, 4.2) as figure:
        axes = figure.subplots()
        for name, way in WAYS.items():
            runs = {n: [found[name][f"{n}-{seed}"] for seed in range(SEEDS)] for n in SIZES}
            look: dict[str, Any] = {"color": way.color, "marker": way.marker, "markersize": 4}
            if "independent" in way.title:
                look["linestyle"] = (0, (4, 2))
            axes.plot([*runs], [np.mean(some) for some in runs.values()], label=way.title, **look)
            for n, some in runs.items():
                axes.vlines(n, min(some), max(some), color=way.color, linewidth=1)
        axes.axhline(float(np.mean([*found[REAL].values()])), color=MUTED, linewidth=1, label=REAL)
        axes.axhline(0.25, color=MUTED, linestyle=(0, (1, 2)), label="a guess")
        axes.set_xscale("log")
        axes.set_xticks(SIZES, [f"{n:,}" for n in SIZES])
        axes.minorticks_off()
        axes.set_xlabel("records a class")
        axes.set_title("AG News: accuracy of a classifier of the sequences", fontsize=9)
        axes.grid(axis="y", color=MUTED, alpha=0.2)
        figure.legend(loc="outside right upper", frameon=False)


def section() -> list[str]:
    """Draw the picture; return the section that shows it."""
    found = json.loads(KEPT.read_text())
    draw(found)
    lines = [
        "## DP-KPS at the paper's size",
        "",
        "![Accuracy of DP-KPS's sequences over the number of records](results_kps_over_n.svg)",
        "",
        f"`python experiments/kps_over_n.py` draws {SEQUENCES} sequences a class at eps_voc + "
        f"eps_kde = {EPSILON_VOCABULARY:g} + {EPSILON_KDE:g} and delta 0, without a language "
        "model. A logistic regression on their embeddings is tested on real texts. Above 1,000 "
        "records a class, the sums of 1,000 are multiplied, and get the noise of one run. Mean "
        f"(least, most) of {SEEDS} runs:",
        "",
        "| records a class | " + " | ".join(way.title for way in WAYS.values()) + " |",
        "|---:|" + "---|" * len(WAYS),
    ]
    for n in SIZES:
        cells = []
        for name in WAYS:
            some = [found[name][f"{n}-{seed}"] for seed in range(SEEDS)]
            cells.append(f"{np.mean(some):.2f} ({min(some):.2f}, {max(some):.2f})")
        lines.append(f"| {n:,} | " + " | ".join(cells) + " |")
    real = np.mean([*found[REAL].values()])
    return [*lines, "", f"The first ten terms of real records, without noise: {real:.2f}."]


if __name__ == "__main__":
    main()
