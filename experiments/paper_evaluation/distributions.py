"""The papers' distances of two sets of texts: precision, recall and F1 of embeddings by nearest
neighbours (Kynkäänniemi et al. 2019; Yue et al. 2023, Xie et al. 2024), and the KL divergence and
total variation of lengths and of clusters of embeddings (Xie et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from sklearn.cluster import KMeans
from sklearn.neighbors import NearestNeighbors

Vectors = npt.NDArray[np.float32]

NEIGHBOURS, CLUSTERS, BIN = 3, 20, 8
"""k of the papers; clusters of embeddings, and words of a length's bin, are ours."""


def f1(made_ND: Vectors, real_MD: Vectors, k: int = NEIGHBOURS) -> dict[str, float]:
    """Return precision, the share of made texts that are within the distance of some real text to
    its k-th nearest real one; recall, with the sides changed; and their harmonic mean."""
    precision, recall = _covered(made_ND, real_MD, k), _covered(real_MD, made_ND, k)
    both = precision + recall
    return {
        "precision": precision,
        "recall": recall,
        "f1": 2 * precision * recall / both if both else 0.0,
    }


def _covered(these_ND: Vectors, others_MD: Vectors, k: int) -> float:
    """Return the share of `these` within the radius of some of the others."""
    own_M = NearestNeighbors(n_neighbors=k + 1).fit(others_MD).kneighbors(others_MD)[0][:, -1]
    squares_NM = (
        (these_ND**2).sum(axis=1)[:, None]
        + (others_MD**2).sum(axis=1)
        - 2.0 * these_ND @ others_MD.T
    )
    return float((np.sqrt(np.maximum(squares_NM, 0.0)) <= own_M).any(axis=1).mean())


def divergences(made: Sequence[int], real: Sequence[int]) -> dict[str, float]:
    """Return KL(real || made) and the total variation of two samples of categories, each category
    with one more text on both sides, so that KL is finite."""
    size = max(*made, *real) + 1
    p, q = (np.bincount(some, minlength=size) + 1.0 for some in (real, made))
    p, q = p / p.sum(), q / q.sum()
    return {"kl": float((p * np.log(p / q)).sum()), "tv": float(np.abs(p - q).sum() / 2)}


def compare_distributions(
    made: Sequence[str], real: Sequence[str], made_ND: Vectors, real_MD: Vectors, seed: int = 0
) -> dict[str, dict[str, float]]:
    """Return every distance of made texts to real ones. F1 and the divergences depend on the number
    of texts: compare releases of one size only."""
    clusters = KMeans(min(CLUSTERS, len(real_MD)), n_init=1, random_state=seed).fit(real_MD)
    lengths = ([len(text.split()) // BIN for text in some] for some in (made, real))
    return {
        "neighbours": f1(made_ND, real_MD),
        "lengths": divergences(*lengths),
        "topics": divergences(
            clusters.predict(made_ND).tolist(), clusters.predict(real_MD).tolist()
        ),
    }
