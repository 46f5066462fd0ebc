"""Private records vote for their nearest public candidates; their shards hold the embeddings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpray.config.config import Config
from dpray.engines.embedder import SentenceTransformerEmbedder
from dpray.mechanisms.discrete_noise import Counts
from dpray.mechanisms.votes import VoteHistogram, count_votes
from dpray.workers.rows import Row
from dpray.workers.shards import Shards

Embeddings = npt.NDArray[np.float32]


class Voters:
    """One shard of the private records, embedded once. Its counts are exact and private: `Vote`
    adds the noise to the sum of all shards."""

    def __init__(self, config: Config) -> None:
        self._embedder = SentenceTransformerEmbedder(config.embedder.model)
        self._parts: defaultdict[str, list[Embeddings]] = defaultdict(list)

    def load(self, rows: Sequence[Row]) -> None:
        by_label: defaultdict[str, list[str]] = defaultdict(list)
        for row in rows:
            by_label[row["label"]].append(row["text"])
        for label, texts in by_label.items():
            # One text at a time: in a batch, its embedding's last bits would depend on the other
            # records, and a record's vote may depend on that record alone.
            self._parts[label].append(self._embedder.embed(texts, batch_size=1))

    def embed(self, texts: Sequence[str]) -> Embeddings:
        """Embed public texts, which may share a batch."""
        return self._embedder.embed(texts)

    def count(self, candidates_ND: Mapping[str, Embeddings]) -> dict[str, Counts]:
        """Count the votes for each label's candidates by the records of that label, shape (N,)
        each."""
        counts = {}
        for label, of_label_ND in candidates_ND.items():
            mine = self._parts.get(label, [])
            private_MD = np.concatenate(mine) if mine else np.zeros((0, of_label_ND.shape[1]), "f4")
            self._parts[label] = [private_MD]
            counts[label] = count_votes(private_MD, of_label_ND)
        return counts


def embedded(voters: Shards, texts: Sequence[str]) -> Embeddings:
    """Embed public texts, shared out among all shards; shape (N, D) for N texts."""
    vectors_ND: Embeddings = np.concatenate(voters.scatter("embed", texts))
    return vectors_ND


@dataclass(frozen=True)
class Vote:
    """One vote of the private records, which the shards `voters` hold. Without a `mechanism` it has
    no noise and is not private."""

    voters: Shards
    mechanism: VoteHistogram | None

    def __call__(self, candidates_ND: Mapping[str, Embeddings]) -> dict[str, Counts]:
        """Return the noisy votes for each label's candidates, shape (N,) each. A record votes in
        its own label only, so all labels together are one application of the mechanism."""
        shards: list[dict[str, Counts]] = self.voters.call("count", dict(candidates_ND))
        exact: dict[str, Counts] = {
            label: np.add.reduce([counts[label] for counts in shards], dtype=np.int64)
            for label in candidates_ND
        }
        if self.mechanism is None:
            return exact
        return {label: self.mechanism(exact_N) for label, exact_N in exact.items()}
