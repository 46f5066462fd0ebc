"""The vectors that accuracies and distances are computed from; each list of texts is embedded once
and kept on disk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from joblib import Memory
from runs import RUNS, as_embedded, rows

from dpray.engines.embedder import SentenceTransformerEmbedder
from dpray.evaluation.downstream import Embedded


@cache
def embedder() -> SentenceTransformerEmbedder:
    return SentenceTransformerEmbedder("sentence-transformers/all-MiniLM-L6-v2")


@Memory(RUNS / "embeddings", verbose=0).cache
def embed(texts: list[str]) -> np.ndarray:
    return embedder().embed(texts)


def embedded(path: Path) -> Embedded:
    """A file's vectors and labels."""
    return as_embedded(rows(path), embed)


class Kept:
    """An embedder whose vectors are kept on disk."""

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        return embed(list(texts))
