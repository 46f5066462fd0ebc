"""The label proportions, measured: exact counts over the shards, noise once."""

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
    """A shard's exact counts; private."""

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
    """The noisy counts of `LabelCounter`s and the proportions they give; the one run of the
    histogram's mechanism."""
    noisy_N = histogram.noisy(np.sum(shards.call("counts"), axis=0))
    return {
        "noisy_counts": dict(zip(histogram.labels, noisy_N.tolist(), strict=True)),
        "proportions": histogram.proportions(noisy_N),
    }
