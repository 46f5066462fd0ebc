"""DP-KPS passes over the private records twice, shard by shard. A shard's answer is exact and
private: the noise is added to the sum of all shards. No text is kept after it was counted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dpray.config.config import Config
from dpray.mechanisms.discrete_noise import Counts
from dpray.methods.dp_kps.algorithm import DensityPass, DpKps, Sums
from dpray.methods.dp_kps.vocabulary import TermMatcher
from dpray.runs.rows import Row
from dpray.runs.shards import Shards

Embeddings = npt.NDArray[np.float32]


class VocabularyShard:
    """Counts, in pass 1, how many records hold each public term."""

    def __init__(self, config: Config, plan: DpKps, terms: Sequence[str]) -> None:
        self._plan, self._matcher = plan, TermMatcher(terms)
        self._counts_V = np.zeros(plan.public_terms, dtype=np.int64)

    def load(self, rows: Sequence[Row]) -> None:
        texts = (row["text"] for row in rows)
        self._counts_V += self._plan.vocabulary_counts(self._matcher, texts)

    def counts(self) -> Counts:
        return self._counts_V


class DensityShard:
    """Computes, in pass 2, each class's sums."""

    def __init__(
        self, config: Config, plan: DpKps, terms: Sequence[str], vectors_ND: Embeddings
    ) -> None:
        self._pass = DensityPass(plan, terms, vectors_ND)
        self._sums = {label: self._pass.sums([]) for label in plan.labels}

    def load(self, rows: Sequence[Row]) -> None:
        by_label: defaultdict[str, list[str]] = defaultdict(list)
        for row in rows:
            by_label[row["label"]].append(row["text"])
        for label, texts in by_label.items():
            self._sums[label] = self._sums[label] + self._pass.sums(texts)

    def sums(self) -> dict[str, Sums]:
        return self._sums


def total_counts(shards: Shards) -> Counts:
    """Return the exact counts over V of all shards; private."""
    total_V: Counts = np.sum(shards.call("counts"), axis=0, dtype=np.int64)
    return total_V


def total_sums(shards: Shards) -> dict[str, Sums]:
    """Return each class's exact sums over all shards, added in the order of the shards; private."""
    parts: list[dict[str, Sums]] = shards.call("sums")
    return {label: sum(part[label] for part in parts) for label in parts[0]}  # type: ignore[misc]
