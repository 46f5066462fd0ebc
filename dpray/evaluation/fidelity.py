"""How far the embeddings of the synthetic records lie from those of real ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.linalg import eigvalsh

from dpray.evaluation.lengths import mean_and_deviation

Vectors = np.ndarray


def frechet_distance(x_ND: Vectors, y_MD: Vectors) -> float:
    """Fréchet distance of the Gaussians fitted to two sets of embeddings (Heusel et al. 2017,
    Eq. 6): `|m_x - m_y|^2 + tr(C_x + C_y - 2 (C_x C_y)^(1/2))`. 0 for equal moments.

    It falls with the number of records even where both sets come from one distribution: compare
    sets of one size only. Raises ValueError for fewer than two records on a side.
    """
    if min(len(x_ND), len(y_MD)) < 2:
        raise ValueError("a covariance needs two records or more")
    x_ND, y_MD = x_ND.astype(np.float64), y_MD.astype(np.float64)
    mean_D = x_ND.mean(axis=0) - y_MD.mean(axis=0)
    c_x, c_y = np.cov(x_ND, rowvar=False), np.cov(y_MD, rowvar=False)
    # tr((C_x C_y)^1/2) is the sum of the square roots of the eigenvalues of a symmetric matrix
    # similar to C_x C_y, which a rounding below 0 cannot make complex.
    root = _root(c_x)
    overlap = np.sqrt(np.maximum(eigvalsh(root @ c_y @ root), 0.0)).sum()
    return float(mean_D @ mean_D + np.trace(c_x) + np.trace(c_y) - 2.0 * overlap)


def compare_fidelity(
    synthetic_ND: Vectors, train_ND: Vectors, test_ND: Vectors, seeds: int
) -> dict[str, Any]:
    """The distance to the real test records, of the synthetic ones and of other real ones, each
    over `seeds` draws of equally many records a side."""
    size = min(len(synthetic_ND), len(train_ND), len(test_ND))

    def spread(other: Vectors) -> dict[str, float]:
        distances = []
        for seed in range(seeds):
            rng = np.random.default_rng(seed)
            x, y = (v[rng.choice(len(v), size, replace=False)] for v in (other, test_ND))
            distances.append(frechet_distance(x, y))
        return mean_and_deviation(distances)

    return {
        "measure": "Fréchet distance of embeddings",
        "records_a_side": size,
        "synthetic_to_real": spread(synthetic_ND),
        "real_to_real": spread(train_ND),
    }


def _root(matrix: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
