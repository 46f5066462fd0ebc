"""Votes of private records for their nearest synthetic texts, by each search and by actors of Ray.

    python -m benchmarks.bench_voting [--ties] [--private 1000000] [--synthetic 5000] [--way host]

Random unit vectors around common centres. With `--ties` a fifth of the records are at exactly the
same distance from two texts, and a tenth of the texts are copies of others. The time has neither
the start of Ray in it nor the way of the shards into the object store. `NearestOnDevice` is on the
GPU if there is one, in float64 and by a shortlist in float32, and so is faiss, if it is installed,
which gives a shortlist only. The benchmark fails if a search gives other votes than the host, and
with `--ties` if the search that believes its shortlist, which is wrong, gives the same ones.
`--actors 0` leaves Ray out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
import typer

from dpray.extras import is_installed
from dpray.mechanisms.votes import NearestText, count_votes
from dpray.mechanisms.votes_on_device import NearestOnDevice

CENTRES = 200

SearchOf: TypeAlias = Callable[[Any], NearestText]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class InFloat64(NearestOnDevice):
    def __init__(self, rows_ND: np.ndarray, device: str = DEVICE) -> None:
        super().__init__(rows_ND, device)
        self._is_exact = True


class ByShortlist(NearestOnDevice):
    def __init__(self, rows_ND: np.ndarray, device: str = DEVICE) -> None:
        super().__init__(rows_ND, device)
        self._is_exact = False


class Believed(ByShortlist):
    """It is wrong: it takes the nearest in float32, whatever rounding could do."""

    def largest_rounding_gap(self, norms_B: Any) -> Any:
        return 0 * norms_B - 1


class ByFaiss(NearestText):
    """The two nearest by faiss, and the host's exact search where rounding could change them."""

    def __init__(self, rows_ND: np.ndarray) -> None:
        import faiss

        super().__init__(rows_ND)
        self._index = faiss.IndexFlatL2(self.rows_UD.shape[1])
        if DEVICE == "cuda":
            self._index = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, self._index)
        self._index.add(self.rows_UD)

    def _in_float32(self, rows_BD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        distances_B2, places_B2 = self._index.search(rows_BD, 2)
        gap_B = distances_B2[:, 1].astype(np.float64) - distances_B2[:, 0]
        return places_B2[:, 0].astype(np.int64), gap_B

    def largest_rounding_gap(self, norms_B: Any) -> Any:
        return 2 * super().largest_rounding_gap(norms_B)  # its distances have |x|^2 in them, too


WRONG = f"{DEVICE}, float32 believed"

SEARCHES: dict[str, SearchOf] = {
    "host": NearestText,
    f"{DEVICE}, float64": InFloat64,
    f"{DEVICE}, float32": ByShortlist,
    f"faiss, {DEVICE}": ByFaiss,
    WRONG: Believed,
}
if not is_installed("faiss"):
    del SEARCHES[f"faiss, {DEVICE}"]


def vectors(rng: np.random.Generator, rows: int, centres: np.ndarray) -> np.ndarray:
    made = np.empty((rows, centres.shape[1]), dtype=np.float32)
    for start in range(0, rows, 100_000):
        part = made[start : start + 100_000]
        part[:] = rng.standard_normal(part.shape, dtype=np.float32)
        part *= 0.7
        part += centres[rng.integers(len(centres), size=len(part))]
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    return made


def tie(records: np.ndarray, texts: np.ndarray) -> None:
    """Put texts at exactly the same distance from records: each second text is the one before it
    with two components exchanged, and these are equal in a fifth of the records."""
    pairs = len(texts) // 2
    texts[1 : 2 * pairs : 2] = texts[: 2 * pairs : 2]
    texts[1 : 2 * pairs : 2, :2] = texts[: 2 * pairs : 2, 1::-1]
    texts[-(len(texts) // 10) :] = texts[: len(texts) // 10]
    records[::5, 1] = records[::5, 0]


def voting(
    private: np.ndarray, synthetic: np.ndarray, search_of: SearchOf
) -> tuple[float, float, np.ndarray]:
    """Return the seconds, those of CPUs, and the votes of this process."""
    count_votes(private[:100], synthetic, search_of)  # the first run pays for threads and kernels
    began, of_cpus = time.perf_counter(), time.process_time()
    votes = count_votes(private, synthetic, search_of)
    return time.perf_counter() - began, time.process_time() - of_cpus, votes


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


def measured(
    records: np.ndarray, texts: np.ndarray, searches: dict[str, SearchOf]
) -> Iterator[tuple[str, float, float, int]]:
    """Yield each way's name, its seconds, those of CPUs, and how many of its votes are others than
    the host's."""
    exact = np.zeros(0)
    for way, search_of in {"host": NearestText, **searches}.items():
        seconds, of_cpus, votes = voting(records, texts, search_of)
        exact = votes if way == "host" else exact
        yield way, seconds, of_cpus, int(np.abs(votes - exact).sum()) // 2


def main(
    private: int = 1_000_000,
    synthetic: int = 5000,
    dimension: int = 384,
    ties: bool = False,
    way: list[str] = list(SEARCHES),  # noqa: B006  # typer's lists
    actors: list[int] = [1, 2],  # noqa: B006
) -> None:
    rng = np.random.default_rng(1)
    centres = rng.standard_normal((CENTRES, dimension), dtype=np.float32)
    records, texts = vectors(rng, private, centres), vectors(rng, synthetic, centres)
    if ties:
        tie(records, texts)
    print(f"{private:,} private x {synthetic:,} synthetic, {dimension} dimensions\n")
    row = "| {} | {:.1f} | {} | {:,.0f} | {} |"
    print(
        "| way | seconds | of CPUs | records per second | other votes |\n|---|---:|---:|---:|---:|"
    )
    for name, seconds, cpus, others in measured(records, texts, {x: SEARCHES[x] for x in way}):
        print(
            row.format(name, seconds, f"{cpus:.1f}", private / seconds, f"{others:,}"), flush=True
        )
        if (others > 0) if name != WRONG else (ties and others == 0):
            raise SystemExit(f"{name}: {others} votes are others than those of the host")
    if not any(actors):
        return
    import ray  # late: a machine with a GPU may have none

    votes = count_votes(records, texts)
    ray.init(num_cpus=max(actors), include_dashboard=False, log_to_driver=False)
    for number in actors:
        seconds, together = voting_on_ray(records, texts, number)
        if (together != votes).any():
            raise SystemExit("the votes of the shards do not add up to the votes of all")
        name = f"Ray, actors of 1 CPU: {number}"
        print(row.format(name, seconds, "", private / seconds, 0))
    ray.shutdown()


if __name__ == "__main__":
    typer.run(main)
