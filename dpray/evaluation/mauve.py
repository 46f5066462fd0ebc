"""MAUVE (Pillutla et al. 2021) is the area under the divergence curve of two sets of embeddings."""

from __future__ import annotations

import warnings

import numpy as np
from scipy.special import rel_entr
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.preprocessing import normalize

SCALING = 5.0
"""The paper sets the c of its divergence curve to this."""

MIXTURES = 25
"""The curve has this many points; the area depends on it, and the authors' package uses as many."""

# The share of the variance in the principal components that k-means clusters.
EXPLAINED_VARIANCE = 0.9

RECORDS_A_CLUSTER = 10
KMEANS_STEPS = 100


def cluster_histograms(p_ND: np.ndarray, q_MD: np.ndarray, seed: int) -> tuple[np.ndarray, ...]:
    """Count each set's vectors in the clusters of both sets together: shapes (K,), (K,).

    The vectors are scaled to norm 1 and reduced to the principal components that hold 90 % of
    their variance; k-means makes one cluster to ten records of the smaller set, two at least.
    Vectors that all point one way make one cluster.
    """
    pooled_PD = normalize(np.vstack([p_ND, q_MD]).astype(np.float64))
    if np.ptp(pooled_PD, axis=0).max() <= np.finfo(np.float32).eps:
        return np.array([len(p_ND)]), np.array([len(q_MD)])
    reduced = PCA(EXPLAINED_VARIANCE, svd_solver="covariance_eigh").fit_transform(pooled_PD)
    count = max(2, round(min(len(p_ND), len(q_MD)) / RECORDS_A_CLUSTER))
    k_means = KMeans(count, init="random", n_init=1, max_iter=KMEANS_STEPS, random_state=seed)
    with warnings.catch_warnings():
        # Copies of a text leave fewer distinct vectors than clusters: the rest stay empty.
        warnings.simplefilter("ignore", ConvergenceWarning)
        cluster_P = k_means.fit_predict(reduced)
    sides = cluster_P[: len(p_ND)], cluster_P[len(p_ND) :]
    return tuple(np.bincount(side, minlength=count) for side in sides)


def divergence_area(p_K: np.ndarray, q_K: np.ndarray) -> float:
    """Return MAUVE of two histograms: the area under the curve (exp(-c KL(q|r)), exp(-c KL(p|r)))
    of the mixtures r = t p + (1 - t) q (Pillutla et al. 2021).

    The curve begins at (0, 1) and ends at (1, 0). The area is 1 where p = q, and 1 / binomial(2c,
    c) in the limit of many mixtures where no cluster holds vectors of both.
    """
    p_K, q_K = p_K / p_K.sum(), q_K / q_K.sum()
    t_R = np.linspace(1e-6, 1 - 1e-6, MIXTURES)[:, None]
    mixtures_RK = t_R * p_K + (1 - t_R) * q_K
    x_R, y_R = (np.exp(-SCALING * rel_entr(side, mixtures_RK).sum(axis=1)) for side in (q_K, p_K))
    # t grows from q to p, so x falls and y grows: from the right end of the curve to the left.
    x, y = np.concatenate([[1.0], x_R, [0.0]]), np.concatenate([[0.0], y_R, [1.0]])
    return float(np.trapezoid(y[::-1], x[::-1]))
