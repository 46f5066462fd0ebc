"""DP-KPS's sequences over S, the terms of a record that count, for docs/results.md.

`python experiments/kps_phrases.py` draws the sequences that are not there yet, scores them, and
keeps the figures in experiments/measured/kps_phrases. No language model: a logistic regression on
embeddings of the sequences is tested on real texts.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
from embedding import embed
from first_release import SETS, parts
from kps_over_n import VOCABULARY
from runs import HERE, accuracy, as_embedded

from dpray.io.files import write_durably
from dpray.mechanisms.term_matcher import TermMatcher
from dpray.methods.config import parse_config
from dpray.methods.dp_kps.algorithm import DensityPass, DpKps, Sequences
from dpray.methods.dp_kps.plan import make_plan, public_terms
from dpray.methods.dp_kps.settings import DpKpsSettings

KEPT = HERE / "measured" / "kps_phrases" / "figures.json"
DATA_SETS = ("banking77", "trec", "yelp", "agnews")
EPSILONS, PHRASES, SEEDS = (1.0, 4.0), (1, 2, 3, 5, 10), 3
SEQUENCES, MOST_TEST = 50, 400
"""Sequences a label, and real texts that test the classifier."""


def method_of(
    epsilon: float, S: int, texts: Mapping[str, Sequence[str]]
) -> tuple[DpKps, list[str]]:
    """Return the method as a run with a language model has it, and the public terms."""
    config = parse_config(
        {
            "data": {
                "path": "private.jsonl", "label": "label", "labels": [*texts],
                "public_size": sum(map(len, texts.values())),
            },
            "privacy": {
                "epsilon": epsilon, "delta": 1e-5, "ledger": "sqlite:///none.db", "dataset": "none",
            },
            "method": {
                "name": "dp_kps", "vocabulary": str(VOCABULARY), "vocabulary_fdr": 0.5,
                "phrases_per_record": S,
            },
            "engine": {"kind": "none"}, "output": {"path": "none"},
        }
    )  # fmt: skip
    assert isinstance(config.method, DpKpsSettings)
    plan = make_plan(config, config.method)
    terms_V = public_terms(plan)
    return replace(plan.method, public_terms=len(terms_V)), terms_V


def sequences(
    method: DpKps, terms_V: Sequence[str], texts: Mapping[str, Sequence[str]], seed: int
) -> tuple[list[dict[str, str]], float]:
    """Return sequences of all labels as records, and the share of drawn terms that a record of
    their label holds."""
    matcher, rng = TermMatcher(terms_V), np.random.default_rng(seed)
    counts_V = method.vocabulary_counts(matcher, (text for some in texts.values() for text in some))
    terms_N = [terms_V[i] for i in method.noisy_vocabulary(counts_V, rng)]
    vectors_ND = np.zeros((len(terms_N), 1), np.float32)  # the histogram needs none
    method = replace(method, public_terms=len(terms_N), dimension=1)
    density = DensityPass(method, terms_N, vectors_ND)
    sums = {label: density.sums(some) for label, some in texts.items()}
    noisy = {label: method.noisy_sums(exact) for label, exact in sums.items()}
    drawn, records, held = Sequences(method, vectors_ND, noisy), [], []
    for label, exact in sums.items():
        ids = drawn.draw(label, SEQUENCES, rng)
        held.append(float((exact[0][ids] > 0).mean()))
        words = (dict.fromkeys(terms_N[i] for i in row) for row in ids)
        records += [{"text": " ".join(some), "label": label} for some in words]
    return records, float(np.mean(held))


def main() -> None:
    found = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for data in DATA_SETS:
        private, test, _ = parts(data)
        texts: defaultdict[str, list[str]] = defaultdict(list)
        for row in private:
            texts[row["label"]].append(row["text"])
        of_test = as_embedded(test[:MOST_TEST], embed)
        for epsilon, S in product(EPSILONS, PHRASES):
            name = f"{data}-{epsilon:g}-{S}"
            if name in found:
                continue
            method, terms_V = method_of(epsilon, S, texts)
            scores = []
            for seed in range(SEEDS):
                records, held = sequences(method, terms_V, texts, seed)
                scores.append((accuracy(as_embedded(records, embed), of_test), held))
            found[name] = [round(float(mean), 3) for mean in np.mean(scores, axis=0)]
            print(name, found[name], flush=True)
            KEPT.parent.mkdir(parents=True, exist_ok=True)
            write_durably(KEPT, json.dumps(found, indent=1) + "\n")


def section() -> list[str]:
    """Return the section of docs/results.md."""
    found = json.loads(KEPT.read_text())
    lines = [
        "## How many terms of a record count",
        "",
        "The noise of DP-KPS grows with S, which is `phrases_per_record`, and a short text has "
        f"few terms. `python experiments/kps_phrases.py` draws {SEQUENCES} sequences a label of "
        "at most eight labels, at delta 1e-5 and without a language model. Each cell has the "
        "accuracy of a logistic regression on their embeddings, tested on real texts. In brackets "
        f"is the share of drawn terms that a record of the label holds. Means of {SEEDS} runs:",
        "",
        f"| set | eps | {' | '.join(f'S {S}' for S in PHRASES)} |",
        f"|---|---:|{'---|' * len(PHRASES)}",
    ]
    for data, epsilon in product(DATA_SETS, EPSILONS):
        figures = (found[f"{data}-{epsilon:g}-{S}"] for S in PHRASES)
        cells = [f"{score:.2f} ({held:.0%})" for score, held in figures]
        lines.append(f"| {SETS[data].title} | {epsilon:g} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
