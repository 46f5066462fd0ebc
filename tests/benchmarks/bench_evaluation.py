"""The parts of `dpray evaluate` that grow with the number of records, each in a process of its own.

    python tests/benchmarks/bench_evaluation.py [--records 10000] [--dimension 384] [--words 60]

Precision and recall, and nearest cosines: `records` normal vectors a side. Shared words: `records`
texts a side with Zipf's word frequencies. MAUVE: one draw of `DRAW` vectors a side. The networks:
4,000 vectors, four labels. Prints Markdown: seconds, and the most memory the process had.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dpray.evaluation.copies import shared_words
from dpray.evaluation.downstream import Embedded
from dpray.evaluation.fidelity import DRAW, cluster_divergences, frechet_distance
from dpray.evaluation.neighbours import nearest_cosine, precision_recall
from dpray.evaluation.network import three_layer_network

VOCABULARY = 50_000


def vectors(records: int, dimension: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((records, dimension), dtype=np.float32)


def texts(records: int, words: int, seed: int) -> list[str]:
    found = np.random.default_rng(seed).zipf(1.3, (records, words)) % VOCABULARY
    return [" ".join(map(str, row)) for row in found]


def networks(records: int, dimension: int, coral: bool) -> None:
    x = vectors(records, dimension, 0)
    three_layer_network(Embedded(x, np.arange(records) % 4), x if coral else None)


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
        "3-layer network, 4,000": lambda: networks(4000, dimension, False),
        "3-layer network with Deep CORAL, 4,000": lambda: networks(4000, dimension, True),
    }


def measure(name: str, records: int, dimension: int, words: int) -> tuple[float, float]:
    """Seconds, with making the data, and the process's most memory in GiB."""
    began = time.perf_counter()
    parts(records, dimension, words)[name]()
    took = time.perf_counter() - began
    return took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main(records: int = 10_000, dimension: int = 384, words: int = 60, only: str = "") -> None:
    print("| a side | seconds | memory, GiB |\n|---|---|---|")
    spawn = multiprocessing.get_context("spawn")
    for name in parts(records, dimension, words):
        if only in name:
            with spawn.Pool(1) as pool:
                took, memory = pool.apply(measure, (name, records, dimension, words))
            print(f"| {name} | {took:.1f} | {memory:.2f} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
