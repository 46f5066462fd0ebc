"""A measurement of Aug-PE's votes: dpray's exact searches on the host and on the device, the one by
faiss if it is installed, and a float32 search that is believed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.bench_voting import CENTRES, SEARCHES, measured, tie, vectors

DIMENSION = 384


def votes(small: bool) -> Iterator[dict[str, Any]]:
    """Yield the records a second of each search, and how many of its votes are others."""
    private, synthetic = (2_000, 100) if small else (1_000_000, 5_000)
    rng = np.random.default_rng(1)
    centres = rng.standard_normal((CENTRES, DIMENSION), dtype=np.float32)
    records, texts = vectors(rng, private, centres), vectors(rng, synthetic, centres)
    for ties in (False, True):
        if ties:
            tie(records, texts)
        for way, seconds, _, others in measured(records, texts, SEARCHES):
            yield {
                "records": private,
                "texts": synthetic,
                "ties": ties,
                "way": way,
                "records a second": private / seconds,
                "other votes": others,
            }
