"""Nearest neighbours among embeddings are searched in blocks: the memory grows with the number of
records, not with the number of pairs."""

from __future__ import annotations

from functools import partial

import numpy as np
from sklearn.neighbors import NearestNeighbors

from dpray.evaluation.chunks import ChunkMap, chunks

NEIGHBOURS = 3
"""This is the k of precision and recall that Kynkäänniemi et al. (2019) recommend."""

# Squared distances of float32 vectors are off by about so much of the largest squared norm.
_ROUNDING = 1e-6

# References that are multiplied at once: 32 MiB with a chunk of queries.
BLOCK = 8192


def precision_recall(synthetic_ND: np.ndarray, real_MD: np.ndarray) -> dict[str, float]:
    """Return improved precision and recall (Kynkäänniemi et al. 2019, Eq. 1 and 2) and their F1.

    Precision is the share of synthetic vectors that lie in a ball around some real one, as wide as
    the distance to its k-th nearest real neighbour; recall is the same with the sides swapped. Both
    depend on the numbers of records: compare sets of one size only, of more than k records.
    """
    # Distances do not change, and rounding is smallest around 0.
    centre_D = real_MD.mean(axis=0)
    synthetic_ND, real_MD = synthetic_ND - centre_D, real_MD - centre_D
    precision = float(_within(synthetic_ND, real_MD).mean())
    recall = float(_within(real_MD, synthetic_ND).mean())
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return {"precision": precision, "recall": recall, "f1": f1}


def nearest_cosine(
    queries_ND: np.ndarray, references_MD: np.ndarray, map_chunks: ChunkMap = map
) -> np.ndarray:
    """Return each query's largest cosine similarity with a reference, shape (queries,). The work
    grows with the number of pairs; `map_chunks` may distribute the queries."""
    largest = partial(_largest_product, _unit(references_MD))
    found = np.concatenate([*map_chunks(largest, chunks(_unit(queries_ND)))])
    return np.clip(found, -1.0, 1.0)


def _largest_product(references_MD: np.ndarray, queries_ND: np.ndarray) -> np.ndarray:
    """Return each query's largest product with a reference, by blocks: FAISS is slower on CPUs."""
    best_N = np.full(len(queries_ND), -np.inf, dtype=np.float32)
    for start in range(0, len(references_MD), BLOCK):
        products_NM = queries_ND @ references_MD[start : start + BLOCK].T
        np.maximum(best_N, products_NM.max(axis=1), out=best_N)
    return best_N


def _within(x_ND: np.ndarray, y_MD: np.ndarray) -> np.ndarray:
    """Tell whether each x lies in the ball of some y, shape (N,).

    |x - y|^2 <= r_y^2 for some y exactly where max_y (2 x.y + r_y^2 - |y|^2) >= |x|^2: one search
    for the largest inner product, of vectors with one coordinate more.
    """
    # Its own nearest neighbour is the vector itself.
    nearest = NearestNeighbors(n_neighbors=NEIGHBOURS + 1, algorithm="brute").fit(y_MD)
    radii_M = nearest.kneighbors(y_MD)[0][:, -1].astype(y_MD.dtype)
    squares_M = np.einsum("md,md->m", y_MD, y_MD)
    squares_N = np.einsum("nd,nd->n", x_ND, x_ND)
    queries = np.column_stack([2 * x_ND, np.ones(len(x_ND), dtype=np.float32)])
    references = np.column_stack([y_MD, radii_M**2 - squares_M])
    best = np.concatenate([_largest_product(references, block) for block in chunks(queries)])
    slack = _ROUNDING * max(squares_M.max(), squares_N.max())
    inside: np.ndarray = best >= squares_N - slack
    return inside


def _unit(vectors: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(norms, np.finfo(np.float32).tiny)
