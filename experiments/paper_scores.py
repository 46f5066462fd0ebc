"""Measures a release as the papers do that dpray follows; `dpray evaluate` has the other measures.

    python experiments/paper_scores.py --real test.jsonl --train private.jsonl \\
        --synthetic out/run --networks --encoder roberta-base --lm HuggingFaceTB/SmolLM2-135M

prints JSON. Each model learns from the synthetic records and from real ones (`--train`, the
ceiling), and is tested on real ones (`--real`). The result is not private.

- `--distances`: precision, recall and F1 by three neighbours, KL and total variation of lengths and
  topics, of synthetic and of as many other real records to real ones.
- `--networks`: the DP-KPS paper's three layers, without and with Deep CORAL (Nagesh et al. 2025).
- `--encoder`: an encoder fine-tuned to classify (Yue et al. 2023; Xie et al. 2024).
- `--lm`: labels learned in context (Amin et al. 2024), and next-word accuracy after fine-tuning
  (Xie et al. 2024). With `--phrases` the labels are phrases of their texts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from paper_evaluation.causal_lm import CausalLM
from paper_evaluation.distributions import compare_distributions
from paper_evaluation.fine_tuning import Encoder, compare_next_word
from paper_evaluation.in_context import (
    InContextClassifier,
    InContextExtractor,
    Learner,
    compare_in_context,
)
from paper_evaluation.network import NETWORKS

from dpray.config.sections import EngineConfig
from dpray.engines.transformers import TransformersEngine
from dpray.evaluation.downstream import Embedded, compare_downstream
from dpray.evaluation.files import load_embedder, read_labelled
from dpray.io.columns import text_of
from dpray.io.formats import AS_RECOGNISED

Example = tuple[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--real", "--train", "--synthetic"):
        parser.add_argument(name, required=True)
    for name in ("--encoder", "--lm"):
        parser.add_argument(name)
    for name in ("--distances", "--networks", "--phrases"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--embedder", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--seeds", type=int, default=5)
    asked = parser.parse_args()
    files = {"synthetic": asked.synthetic, "ceiling": asked.train, "test": asked.real}
    sets: Any = {
        name: read_labelled(path, name, partial(text_of, column="text"), "label", AS_RECOGNISED)
        for name, path in files.items()
    }
    print(json.dumps(scores(sets, asked), indent=2))


def scores(sets: Mapping[str, Sequence[Example]], asked: argparse.Namespace) -> dict[str, Any]:
    """Return what was asked for: `distances`, `classifiers`, `in_context` and `next_word`."""
    sets = dict(sets)
    found: dict[str, Any] = {"classifiers": []}
    vectors: dict[str, Embedded] = {}
    if asked.networks or asked.distances:
        embedder = load_embedder(asked.embedder)
        vectors = {name: labelled(rows, embedder.embed(texts(rows))) for name, rows in sets.items()}
    if asked.distances:
        size = min(map(len, sets.values()))
        found["distances"] = {
            name: compare_distributions(
                texts(sets[name])[:size],
                texts(sets["test"])[:size],
                vectors[name].vectors[:size],
                vectors["test"].vectors[:size],
            )
            for name in ("synthetic", "ceiling")
        }
    if asked.networks:
        test = vectors.pop("test")
        found["classifiers"] += [
            compare_downstream(vectors, test, asked.seeds, fit, name)
            for name, fit in NETWORKS.items()
        ]
    if asked.encoder is not None:
        encoder = Encoder(asked.encoder)
        whole = {
            name: labelled(rows, np.array(texts(rows), dtype=object)) for name, rows in sets.items()
        }
        test = whole.pop("test")
        name = f"fine-tuned {encoder.name}"
        found["classifiers"].append(compare_downstream(whole, test, asked.seeds, encoder.fit, name))
    if asked.lm is not None:
        lm, tested = CausalLM(asked.lm), sets.pop("test")
        if None not in {label for _, label in tested}:
            learner = learner_of(lm, tested, asked.phrases)
            found["in_context"] = compare_in_context(learner, sets, tested, asked.seeds)
        trained_on = {name: texts(rows) for name, rows in sets.items()}
        found["next_word"] = compare_next_word(lm, trained_on, texts(tested), asked.seeds)
    return found


def learner_of(lm: CausalLM, tested: Sequence[Example], phrases: bool) -> Learner:
    if phrases:
        engine = TransformersEngine(EngineConfig(model=lm.name, dtype="float32"))
        return InContextExtractor(engine)
    return InContextClassifier(lm, sorted({label for _, label in tested}))


def texts(rows: Sequence[Example]) -> list[str]:
    return [text for text, _ in rows]


def labelled(rows: Sequence[Example], vectors: np.ndarray) -> Embedded:
    return Embedded(vectors, np.array([label for _, label in rows]))


if __name__ == "__main__":
    main()
