"""A measurement of Aug-PE's votes: dpray's exact search on the host and on the device, and a plain
float32 search on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.bench_voting import CENTRES, vectors, voting, voting_by_torch

DIMENSION = 384


def votes(small: bool) -> Iterator[dict[str, Any]]:
    """Yield the records a second of both, and how many of the device's votes are others."""
    private, synthetic = (2_000, 100) if small else (1_000_000, 5_000)
    rng = np.random.default_rng(1)
    centres = rng.standard_normal((CENTRES, DIMENSION), dtype=np.float32)
    records, texts = vectors(rng, private, centres), vectors(rng, synthetic, centres)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    seconds, exact = voting(records, texts)
    ways = {"count_votes, host": (seconds, exact)}
    ways[f"count_votes, {device}"] = voting(records, texts, device)
    ways[f"torch, {device}, float32"] = voting_by_torch(records, texts, device)
    for way, (seconds, counted) in ways.items():
        yield {
            "records": private,
            "texts": synthetic,
            "way": way,
            "records a second": private / seconds,
            "other votes": int(np.abs(counted - exact).sum()) // 2,
        }
