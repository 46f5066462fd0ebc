"""DP-KPS: Fourier features of many phrases, and the vocabulary pass over many records.

    python -m tests.benchmarks.bench_kps [--phrases 1000000] [--records 1000000]

Features: blocks of `FeatureSum` and `FourierFeatures` against the same sums one row at a time and
by one einsum without blocks, both on a sample. Vocabulary: 400,000 made-up terms, one in four of
two words, in texts of 40 words with Zipf's frequencies, made in the actor as they are asked for;
one and two Ray actors. Prints Markdown.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np
import ray
import typer

from dpray.mechanisms.term_matcher import TermMatcher
from dpray.methods.dp_kps.mechanisms import BLOCK, FeatureSum, FourierFeatures, VocabularyHistogram

D, I, S, V, WORDS = 384, 1000, 10, 400_000, 40  # noqa: E741
SHARD = 10_000
SAMPLE = 5_000


def resident_mib() -> float:
    """The most memory the process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def in_blocks(features: FourierFeatures, vectors: np.ndarray, phrases: int) -> np.ndarray:
    """The sums of so many phrases; `vectors` again and again."""

    def blocks() -> Iterator[np.ndarray]:
        for start in range(0, phrases, BLOCK):
            yield features(vectors[: min(BLOCK, phrases - start)])

    return FeatureSum(I, "laplace", 1.0).sum(blocks())


def row_by_row(w: np.ndarray, b: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    total = np.zeros(I)
    for x in vectors:
        total += np.sqrt(2) * np.cos(x.astype(np.float64) @ w + b)
    return total


def unblocked(w: np.ndarray, b: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    arguments = np.einsum("nd,di->ni", vectors.astype(np.float64), w) + b
    return (np.sqrt(2) * np.cos(arguments)).sum(axis=0)


def bench_features(phrases: int) -> Iterator[str]:
    features = FourierFeatures(D, I, 1.0, seed=1)
    vectors = np.random.default_rng(2).standard_normal((BLOCK, D)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    w, b = features.angles(np.eye(D)), features.phases
    sample = np.resize(vectors, (SAMPLE, D))
    in_blocks(features, vectors, BLOCK)
    before = resident_mib()
    ways: dict[str, tuple[int, Callable[[], object]]] = {
        "dpray, in blocks": (phrases, lambda: in_blocks(features, vectors, phrases)),
        "one row at a time": (SAMPLE, lambda: row_by_row(w, b, sample)),
        "one einsum, no blocks": (SAMPLE, lambda: unblocked(w, b, sample)),
    }
    yield f"Sums of I = {I} features of phrases of {D} dimensions:"
    yield ""
    yield "| way | phrases | seconds | phrases a second | MiB more than before |"
    yield "|---|---|---|---|---|"
    for name, (number, work) in ways.items():
        took = seconds(work)
        more = resident_mib() - before
        yield f"| {name} | {number:,} | {took:.1f} | {number / took:,.0f} | {more:,.0f} |"


class VocabularyPass:
    """An actor with the matcher, and texts to make records from."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        words = [f"w{number:x}" for number in range(V * 3 // 4)]
        pairs = [f"{words[i]} {words[j]}" for i, j in rng.integers(0, 2000, (V // 4, 2))]
        self.matcher = TermMatcher(words + pairs)
        self.histogram = VocabularyHistogram(len(self.matcher.terms), S, scale=10.0)
        draws = np.minimum(rng.zipf(1.3, (SHARD, WORDS)), 2 * V) - 1
        self.texts = [" ".join(f"w{number:x}" for number in row) for row in draws]

    def count(self, records: int) -> np.ndarray:
        texts = self.texts[:records]
        return self.histogram.count(self.matcher.first_terms(text, S) for text in texts)

    def resident_mib(self) -> float:
        return resident_mib()


def bench_vocabulary(records: int) -> Iterator[str]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    remote = ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(VocabularyPass)
    local = VocabularyPass()
    yield f"Vocabulary pass, {V:,} terms, texts of {WORDS} words:"
    yield ""
    yield "| way | records | seconds | records a second | MiB an actor, before and after |"
    yield "|---|---|---|---|---|"
    for number in (1, 2):
        actors = [remote.remote() for _ in range(number)]
        ray.get([actor.count.remote(100) for actor in actors])
        before = max(ray.get([actor.resident_mib.remote() for actor in actors]))
        pool = ray.util.ActorPool(actors)
        shards = [min(SHARD, records - start) for start in range(0, records, SHARD)]
        total = np.zeros(len(local.matcher.terms), dtype=np.int64)
        began = time.perf_counter()
        for counts in pool.map_unordered(lambda actor, size: actor.count.remote(size), shards):
            total += counts
        took = time.perf_counter() - began
        after = max(ray.get([actor.resident_mib.remote() for actor in actors]))
        memory = f"{before:,.0f}, {after:,.0f}"
        name = f"{number} actor{'s' if number > 1 else ''}"
        yield f"| {name} | {records:,} | {took:.1f} | {records / took:,.0f} | {memory} |"
        for actor in actors:
            ray.kill(actor)
    ray.shutdown()
    yield ""
    noise = seconds(lambda: local.histogram(total))
    yield f"Exact noise on all {len(local.matcher.terms):,} counts: {noise:.1f} s."
    yield exact_noise()


def exact_noise() -> str:
    """The time of the noise of one class and estimator, by its kind."""
    took, zeros_I = [], np.zeros(I, dtype=np.int64)
    for kind in ("laplace", "gaussian"):
        mechanism = FeatureSum(I, kind, 0.8)
        one = seconds(lambda mechanism=mechanism: [mechanism(zeros_I) for _ in range(20)])
        took.append(f"{kind} {1000 * one / 20:.0f} ms")
    return (
        f"Exact noise on I = {I:,} features: {', '.join(took)}, once for each class and estimator."
    )


def main(phrases: int = 1_000_000, records: int = 1_000_000) -> None:
    for line in chain(bench_features(phrases), [""], bench_vocabulary(records)):
        print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
