"""Votes of private records for their nearest synthetic texts, beside brute force.

    python -m tests.benchmarks.bench_voting [--json] [--private 1000000] [--synthetic 5000]
        [--dimension 384] [--rivals 1.0]

Random unit vectors around common centres. Every way runs alone in a process of its own, one after
the other on the same vectors; `--rivals` is the share of the records that numpy and scikit-learn
get, whose rows per second are then those of that share. "memory" is the peak resident memory over
what the process held before (its data); Ray's ways show none: actors are processes of their own.
Starting Ray, and putting the shards into the object store, is not in the time.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import typer

BLOCK = 4096
CENTRES = 200


def vectors(rng: np.random.Generator, rows: int, centres: np.ndarray) -> np.ndarray:
    made = np.empty((rows, centres.shape[1]), dtype=np.float32)
    for start in range(0, rows, 100_000):
        part = made[start : start + 100_000]
        part[:] = rng.standard_normal(part.shape, dtype=np.float32)
        part *= 0.7
        part += centres[rng.integers(len(centres), size=len(part))]
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    return made


def data(private: int, synthetic: int, dimension: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    centres = rng.standard_normal((CENTRES, dimension), dtype=np.float32)
    return vectors(rng, private, centres), vectors(rng, synthetic, centres)


def with_dpray(private: np.ndarray, synthetic: np.ndarray) -> np.ndarray:
    from dpray.mechanisms.votes import count_votes

    return count_votes(private, synthetic)


def with_numpy(private: np.ndarray, synthetic: np.ndarray) -> np.ndarray:
    squares = (synthetic**2).sum(axis=1)
    counts = np.zeros(len(synthetic), dtype=np.int64)
    for start in range(0, len(private), BLOCK):
        order = squares - 2 * private[start : start + BLOCK] @ synthetic.T
        counts += np.bincount(order.argmin(axis=1), minlength=len(counts))
    return counts


def with_sklearn(private: np.ndarray, synthetic: np.ndarray) -> np.ndarray:
    from sklearn.neighbors import NearestNeighbors

    search = NearestNeighbors(n_neighbors=1, algorithm="brute").fit(synthetic)
    nearest = search.kneighbors(private, return_distance=False)[:, 0]
    return np.bincount(nearest, minlength=len(synthetic))


def alone(
    way: Callable[..., np.ndarray], sizes: tuple[int, int, int], rows: int, pipe: Any
) -> None:
    """Runs one way on the first `rows` records; sends seconds, bytes and votes."""
    private, synthetic = data(*sizes)
    way(private[:100], synthetic)  # the first run pays for imports and threads
    before = psutil.Process().memory_info().rss
    began = time.perf_counter()
    votes = way(private[:rows], synthetic)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pipe.send((seconds, max(0, peak - before), votes))


def with_ray(sizes: tuple[int, int, int], actors: int) -> tuple[float, np.ndarray]:
    import ray

    from dpray.mechanisms.votes import count_votes

    class Voter:
        def votes(self, private: np.ndarray, synthetic: np.ndarray) -> np.ndarray:
            return count_votes(private, synthetic)

    private, synthetic = data(*sizes)
    options = {"num_cpus": 1, "max_restarts": 0, "max_task_retries": 0}
    voters = [ray.remote(**options)(Voter).remote() for _ in range(actors)]
    texts = ray.put(synthetic)
    shards = [ray.put(shard) for shard in np.array_split(private, actors)]
    ray.get([voter.votes.remote(private[:100], texts) for voter in voters])
    began = time.perf_counter()
    parts = ray.get([v.votes.remote(s, texts) for v, s in zip(voters, shards, strict=True)])
    seconds = time.perf_counter() - began
    for voter in voters:
        ray.kill(voter)
    return seconds, np.sum(parts, axis=0)


def measure(sizes: tuple[int, int, int], rivals: float) -> dict[str, dict[str, Any]]:
    spawn = multiprocessing.get_context("spawn")
    found: dict[str, dict[str, Any]] = {}
    votes: dict[tuple[str, int], np.ndarray] = {}
    share = max(1, round(sizes[0] * rivals))
    ways = {
        "count_votes": (with_dpray, sizes[0]),
        "numpy, blocks": (with_numpy, share),
        "scikit-learn, brute": (with_sklearn, share),
    }
    for name, (way, rows) in ways.items():
        here, there = spawn.Pipe()
        child = spawn.Process(target=alone, args=(way, sizes, rows, there))
        child.start()
        there.close()
        seconds, memory, votes[name, rows] = here.recv()
        child.join()
        found[name] = {"records": rows, "seconds": seconds, "memory_mib": memory / 2**20}
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        for actors in (1, 2):
            name = f"count_votes, {actors} Ray actor{'s' * (actors > 1)} of 1 CPU"
            seconds, votes[name, sizes[0]] = with_ray(sizes, actors)
            found[name] = {"records": sizes[0], "seconds": seconds, "memory_mib": None}
            if (votes[name, sizes[0]] != votes["count_votes", sizes[0]]).any():
                raise RuntimeError("votes of shards do not add up to the votes of all")
    finally:
        ray.shutdown()
    ours = sizes[0] / found["count_votes"]["seconds"]
    for row in found.values():
        row["rows_per_second"] = row["records"] / row["seconds"]
        row["of_count_votes"] = row["rows_per_second"] / ours
    return found


def main(
    private: int = 1_000_000,
    synthetic: int = 5000,
    dimension: int = 384,
    rivals: float = 1.0,
    as_json: bool = typer.Option(False, "--json"),
) -> None:
    found = measure((private, synthetic, dimension), rivals)
    if as_json:
        print(json.dumps({"private": private, "synthetic": synthetic, "ways": found}))
        return
    print(f"{private:,} private x {synthetic:,} synthetic, {dimension} dimensions\n")
    print("| way | records | seconds | records per second | of count_votes | memory, MiB |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, row in found.items():
        memory = "-" if row["memory_mib"] is None else f"{row['memory_mib']:,.0f}"
        print(
            f"| {name} | {row['records']:,} | {row['seconds']:.1f} | "
            f"{row['rows_per_second']:,.0f} | {row['of_count_votes']:.2f} | {memory} |"
        )


if __name__ == "__main__":
    typer.run(main)
