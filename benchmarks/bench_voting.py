"""Votes of private records for their nearest synthetic texts, alone, by torch and by actors of Ray.

    python -m benchmarks.bench_voting [--private 1000000] [--synthetic 5000]

Random unit vectors around common centres. The time has neither the start of Ray in it nor the way
of the shards into the object store. `count_votes` by torch is on the GPU if there is one, and so is
a plain search in float32, which does not settle near-ties.
"""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import torch
import typer

from dpray.mechanisms.votes import count_votes
from dpray.mechanisms.votes_on_device import NearestOnDevice

CENTRES = 200
BLOCK = 16_384


def vectors(rng: np.random.Generator, rows: int, centres: np.ndarray) -> np.ndarray:
    made = np.empty((rows, centres.shape[1]), dtype=np.float32)
    for start in range(0, rows, 100_000):
        part = made[start : start + 100_000]
        part[:] = rng.standard_normal(part.shape, dtype=np.float32)
        part *= 0.7
        part += centres[rng.integers(len(centres), size=len(part))]
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    return made


def voting(
    private: np.ndarray, synthetic: np.ndarray, device: str | None = None
) -> tuple[float, np.ndarray]:
    """Return the seconds and the votes of this process."""
    search_of = None if device is None else partial(NearestOnDevice, device=device)
    count_votes(private[:100], synthetic, search_of)  # the first run pays for threads and kernels
    began = time.perf_counter()
    votes = count_votes(private, synthetic, search_of)
    return time.perf_counter() - began, votes


def voting_by_torch(
    private: np.ndarray, synthetic: np.ndarray, device: str
) -> tuple[float, np.ndarray]:
    """Return the seconds and the votes of a plain search in float32, copies to the device
    included."""
    texts = torch.from_numpy(synthetic).to(device)

    def votes_of(records: np.ndarray) -> np.ndarray:
        votes = torch.zeros(len(texts), dtype=torch.long, device=device)
        for start in range(0, len(records), BLOCK):
            block = torch.from_numpy(records[start : start + BLOCK]).to(device)
            nearest = (texts.square().sum(1) - 2 * block @ texts.T).argmin(dim=1)
            votes += torch.bincount(nearest, minlength=len(texts))
        counted: np.ndarray = votes.cpu().numpy()
        return counted

    votes_of(private[:100])
    began = time.perf_counter()
    votes = votes_of(private)
    return time.perf_counter() - began, votes


def voting_on_ray(
    private: np.ndarray, synthetic: np.ndarray, actors: int
) -> tuple[float, np.ndarray]:
    """Return the seconds and the votes of actors of one CPU each."""
    import ray  # late: a machine with a GPU may have none

    class Voter:
        def votes(self, private: np.ndarray, synthetic: np.ndarray) -> np.ndarray:
            return count_votes(private, synthetic)

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


def main(private: int = 1_000_000, synthetic: int = 5000, dimension: int = 384) -> None:
    rng = np.random.default_rng(1)
    centres = rng.standard_normal((CENTRES, dimension), dtype=np.float32)
    records, texts = vectors(rng, private, centres), vectors(rng, synthetic, centres)
    print(f"{private:,} private x {synthetic:,} synthetic, {dimension} dimensions\n")
    print("| way | seconds | records per second |\n|---|---:|---:|")
    seconds, votes = voting(records, texts)
    print(f"| count_votes | {seconds:.1f} | {private / seconds:,.0f} |")
    import ray

    device = "cuda" if torch.cuda.is_available() else "cpu"
    seconds, there = voting(records, texts, device)
    if (there != votes).any():
        raise SystemExit(f"{device}: other votes than those of the host")
    print(f"| count_votes, {device} | {seconds:.1f} | {private / seconds:,.0f} |")
    seconds, near = voting_by_torch(records, texts, device)
    print(f"| torch, {device}, float32 | {seconds:.1f} | {private / seconds:,.0f} |")
    print(f"\n{np.abs(near - votes).sum() // 2} votes of torch are others.\n")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    for actors in (1, 2):
        seconds, together = voting_on_ray(records, texts, actors)
        if (together != votes).any():
            raise SystemExit("the votes of the shards do not add up to the votes of all")
        print(f"| Ray, actors of 1 CPU: {actors} | {seconds:.1f} | {private / seconds:,.0f} |")
    ray.shutdown()


if __name__ == "__main__":
    typer.run(main)
