"""The label proportions are measured: the shards count exactly, and noise is added once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dpray.config.config import Config
from dpray.mechanisms.label_histogram import LabelHistogram
from dpray.runs.plan import label_histogram
from dpray.runs.rows import Row
from dpray.runs.shards import Shards


class LabelCounter:
    """A `LabelCounter` holds a shard's exact counts, which are private."""

    def __init__(self, config: Config) -> None:
        histogram = label_histogram(config)
        assert histogram is not None
        self._histogram = histogram
        self._counts_N = np.zeros(len(histogram.labels), dtype=np.int64)

    def load(self, rows: Sequence[Row]) -> None:
        self._counts_N += self._histogram.count(row["label"] for row in rows)

    def counts(self) -> npt.NDArray[np.int64]:
        return self._counts_N


def measure(shards: Shards, histogram: LabelHistogram) -> dict[str, Any]:
    """Return the noisy counts of the `LabelCounter`s and the proportions that follow from them;
    this is the one run of the histogram's mechanism."""
    noisy_N = histogram.noisy(np.sum(shards.call("counts"), axis=0))
    return {
        "noisy_counts": dict(zip(histogram.labels, noisy_N.tolist(), strict=True)),
        "proportions": histogram.proportions(noisy_N),
    }
