"""Fidelity is the closeness of the embeddings of synthetic records to those of real ones."""

from __future__ import annotations

import warnings

import numpy as np
from scipy.linalg import eigvalsh
from scipy.special import rel_entr
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.preprocessing import normalize

from dpray.evaluation.downstream import summaries
from dpray.types import Json, OnProgress, Progress, no_progress

Vectors = np.ndarray
Measures = dict[str, float]

DRAW = 5000
"""A draw for MAUVE takes at most this many records a side (Xie et al. 2024, Appendix B.4)."""

FEWEST_RECORDS = 8
"""The fewest records a side that can be measured."""

SCALING = 5.0
"""The c of MAUVE's divergence curve, as in the paper."""

MIXTURES = 25
"""Points of MAUVE's curve, as in the authors' package; the area depends on the number."""

EXPLAINED_VARIANCE = 0.9
"""MAUVE's k-means clusters the principal components with this share of the variance."""

RECORDS_A_CLUSTER = 10
KMEANS_STEPS = 100


def compare_fidelity(
    synthetic_ND: Vectors,
    other_MD: Vectors,
    test_KD: Vectors,
    seeds: int,
    on_progress: OnProgress = no_progress,
) -> Json:
    """Take each measure between real test records and synthetic ones and, as a reference, between
    real test records and other real ones. Each of the `seeds` draws has equally many a side."""
    size = min(len(synthetic_ND), len(other_MD), len(test_KD))
    sides = {"synthetic_to_real": synthetic_ND, "real_to_real": other_MD}
    draws: dict[str, list[Measures]] = {name: [] for name in sides}
    for seed in range(seeds):
        on_progress(Progress("fidelity", seed, seeds))
        for name, vectors in sides.items():
            draws[name].append(_draw(vectors, test_KD, size, seed))
    found = {name: summaries(scores) for name, scores in draws.items()}
    return {
        "records_a_side": size,
        "records_a_draw": min(size, DRAW),
        "draws": seeds,
        "measures": {
            measure: {name: found[name][measure] for name in sides}
            for measure in found["real_to_real"]
        },
    }


def _draw(other_ND: Vectors, test_MD: Vectors, size: int, seed: int) -> Measures:
    """Take every measure of one draw. A seed draws the same test records in both comparisons."""
    rng = np.random.default_rng(seed)
    x, y = (v[rng.choice(len(v), size, replace=False)] for v in (other_ND, test_MD))
    few_x, few_y = x[:DRAW], y[:DRAW]
    return {
        "frechet_distance": frechet_distance(x, y),
        "mauve": mauve(few_x, few_y, seed),
    }


def frechet_distance(x_ND: Vectors, y_MD: Vectors) -> float:
    """Return the Fréchet distance of the Gaussians fitted to two sets of embeddings (Heusel et al.
    2017, Eq. 6): `|m_x - m_y|^2 + tr(C_x + C_y - 2 (C_x C_y)^(1/2))`, which is 0 for equal moments.

    The distance falls with the number of records even if both sets come from one distribution, so
    compare sets of one size only. It takes two records or more.
    """
    x_ND, y_MD = x_ND.astype(np.float64), y_MD.astype(np.float64)
    mean_D = x_ND.mean(axis=0) - y_MD.mean(axis=0)
    c_x, c_y = np.cov(x_ND, rowvar=False), np.cov(y_MD, rowvar=False)
    # tr((C_x C_y)^1/2) is the sum of the square roots of the eigenvalues of C_x C_y. A symmetric
    # matrix with the same eigenvalues keeps rounding errors from making them complex.
    root = _root(c_x)
    overlap = np.sqrt(np.maximum(eigvalsh(root @ c_y @ root), 0.0)).sum()
    return float(mean_D @ mean_D + np.trace(c_x) + np.trace(c_y) - 2.0 * overlap)


def _root(matrix: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix)
    root: np.ndarray = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
    return root


def mauve(x_ND: Vectors, y_MD: Vectors, seed: int) -> float:
    """Return MAUVE of two sets of embeddings (Pillutla et al. 2021): 1 for indistinguishable sets.

    It depends on the number of records: compare sets of one size only.
    """
    return divergence_area(*cluster_histograms(y_MD, x_ND, seed))


def cluster_histograms(p_ND: Vectors, q_MD: Vectors, seed: int) -> tuple[np.ndarray, ...]:
    """Count each set's vectors in the clusters of both sets together: shapes (K,), (K,).

    The vectors are scaled to norm 1 and reduced to the principal components with 90 % of their
    variance. K-means makes one cluster for ten records of the smaller set, at least two. Vectors
    that all point in one direction make one cluster.
    """
    pooled_PD = normalize(np.vstack([p_ND, q_MD]).astype(np.float64))
    if np.ptp(pooled_PD, axis=0).max() <= np.finfo(np.float32).eps:
        return np.array([len(p_ND)]), np.array([len(q_MD)])
    reduced = PCA(EXPLAINED_VARIANCE, svd_solver="covariance_eigh").fit_transform(pooled_PD)
    count = max(2, round(min(len(p_ND), len(q_MD)) / RECORDS_A_CLUSTER))
    k_means = KMeans(count, init="random", n_init=1, max_iter=KMEANS_STEPS, random_state=seed)
    with warnings.catch_warnings():
        # With many copies, there may be fewer distinct vectors than clusters: some stay empty.
        warnings.simplefilter("ignore", ConvergenceWarning)
        cluster_P = k_means.fit_predict(reduced)
    sides = cluster_P[: len(p_ND)], cluster_P[len(p_ND) :]
    return tuple(np.bincount(side, minlength=count) for side in sides)


def divergence_area(p_K: np.ndarray, q_K: np.ndarray) -> float:
    """Return MAUVE of two histograms: the area under the curve (exp(-c KL(q|r)), exp(-c KL(p|r)))
    of the mixtures r = t p + (1 - t) q (Pillutla et al. 2021).

    The curve begins at (0, 1) and ends at (1, 0). The area is 1 for p = q. If no cluster holds
    vectors of both, it is 1 / binomial(2c, c) in the limit of many mixtures.
    """
    p_K, q_K = p_K / p_K.sum(), q_K / q_K.sum()
    t_R = np.linspace(1e-6, 1 - 1e-6, MIXTURES)[:, None]
    mixtures_RK = t_R * p_K + (1 - t_R) * q_K
    x_R, y_R = (np.exp(-SCALING * rel_entr(side, mixtures_RK).sum(axis=1)) for side in (q_K, p_K))
    # t goes from q to p: x falls and y grows, from the right end of the curve to the left.
    x, y = np.concatenate([[1.0], x_R, [0.0]]), np.concatenate([[0.0], y_R, [1.0]])
    return float(np.trapezoid(y[::-1], x[::-1]))
