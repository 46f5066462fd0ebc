"""The parts of `dpray evaluate` that grow with the number of records, each in a process of its own.

    python tests/benchmarks/bench_evaluation.py [--records 10000] [--dimension 384] [--words 60]
    python tests/benchmarks/bench_evaluation.py --whole 100000

Precision and recall, and nearest cosines: `records` normal vectors a side. Shared words: `records`
texts a side with Zipf's word frequencies. MAUVE: one draw of `DRAW` vectors a side. Prints
Markdown: seconds, and the most memory the process had.

`--whole` measures all of `dpray evaluate` instead: as many synthetic records, real ones to train on
and real ones to test on, of words of the demo's notes. A hashing projection stands in for the
embedding model, whose time grows with the number of records alone.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import typer
from sklearn.feature_extraction.text import HashingVectorizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dpray.evaluation.copies import nearest_cosine, shared_words
from dpray.evaluation.evaluate import Labelled, evaluate
from dpray.evaluation.fidelity import (
    DRAW,
    cluster_divergences,
    frechet_distance,
    precision_recall,
)
from dpray.types import Progress

VOCABULARY = 50_000
NOTES = Path(__file__).resolve().parents[2] / "dpray" / "demo" / "data" / "public.jsonl"


def vectors(records: int, dimension: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((records, dimension), dtype=np.float32)


def texts(records: int, words: int, seed: int) -> list[str]:
    found = np.random.default_rng(seed).zipf(1.3, (records, words)) % VOCABULARY
    return [" ".join(map(str, row)) for row in found]


def parts(records: int, dimension: int, words: int) -> dict[str, Callable[[], object]]:
    def pair(n: int) -> tuple[np.ndarray, np.ndarray]:
        return vectors(n, dimension, 0), vectors(n, dimension, 1)

    def words_in_common() -> object:
        return shared_words(texts(records, words, 0), texts(records, words, 1))

    return {
        f"precision and recall, {records:,}": lambda: precision_recall(*pair(records)),
        f"nearest cosines, {records:,}": lambda: nearest_cosine(*pair(records)),
        f"Fréchet distance, {records:,}": lambda: frechet_distance(*pair(records)),
        f"shared words, {records:,} texts of {words}": words_in_common,
        f"MAUVE, KL and total variation, {DRAW:,}": lambda: cluster_divergences(*pair(DRAW), 0),
    }


def measure(name: str, records: int, dimension: int, words: int) -> tuple[float, float]:
    """Seconds, with making the data, and the process's most memory in GiB."""
    began = time.perf_counter()
    parts(records, dimension, words)[name]()
    took = time.perf_counter() - began
    return took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class HashingEmbedder:
    """Hashed word counts, projected at random."""

    def __init__(self, dimension: int) -> None:
        self.counter = HashingVectorizer(n_features=2**14, alternate_sign=False)
        self.projection = vectors(2**14, dimension, 0) / dimension**0.5

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        found = np.asarray(self.counter.transform(texts) @ self.projection, dtype=np.float32)
        return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-9)


def notes(count: int, words: int, seed: int) -> list[Labelled]:
    """Notes of the demo's words, drawn one by one as often as they occur with a label; some 60 %
    of them are those of all labels."""
    of_label: dict[str, Counter[str]] = {}
    with open(NOTES, encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            of_label.setdefault(row["label"], Counter()).update(row["text"].split())
    every = sum(of_label.values(), Counter())
    rng = np.random.default_rng(seed)
    made: list[Labelled] = []
    for label, own in sorted(of_label.items()):
        drawn = []
        for counts, share in ((own, 0.4), (every, 0.6)):
            chances = np.array(list(counts.values())) / counts.total()
            size = (-(-count // len(of_label)), round(words * share))
            drawn.append(rng.choice(list(counts), size, p=chances))
        made += [(" ".join(row), label) for row in np.hstack(drawn)]
    rng.shuffle(made)
    return [(str(text), str(label)) for text, label in made[:count]]


def measure_whole(count: int, dimension: int, words: int) -> tuple[dict[str, float], float]:
    """Seconds of each part as the progress bar names them, and the process's most memory."""
    synthetic, train, test = (notes(count, words, seed) for seed in range(3))
    began: dict[str, float] = {}

    def stamp(progress: Progress) -> None:
        began.setdefault(progress.activity, time.perf_counter())

    evaluate(test, synthetic, HashingEmbedder(dimension), train=train, seeds=3, on_progress=stamp)
    ends = [*list(began.values())[1:], time.perf_counter()]
    took = {part: end - at for (part, at), end in zip(began.items(), ends, strict=True)}
    return took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main(
    records: int = 10_000, dimension: int = 384, words: int = 60, only: str = "", whole: int = 0
) -> None:
    spawn = multiprocessing.get_context("spawn")
    if whole:
        with spawn.Pool(1) as pool:
            took, memory = pool.apply(measure_whole, (whole, dimension, words))
        print("| part | seconds |\n|---|---|")
        for part, seconds in took.items():
            print(f"| {part} | {seconds:.1f} |")
        print(f"\nMost memory: {memory:.2f} GiB")
        return
    print("| a side | seconds | memory, GiB |\n|---|---|---|")
    for name in parts(records, dimension, words):
        if only in name:
            with spawn.Pool(1) as pool:
                took, memory = pool.apply(measure, (name, records, dimension, words))
            print(f"| {name} | {took:.1f} | {memory:.2f} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
