"""Fidelity is the closeness of the embeddings of synthetic records to those of real ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.linalg import eigvalsh
from sklearn.decomposition import PCA

from dpray.evaluation.mauve import cluster_histograms, divergence_area
from dpray.evaluation.neighbours import NEIGHBOURS, precision_recall
from dpray.evaluation.scores import mean_and_deviation
from dpray.types import OnProgress, Progress

Vectors = np.ndarray
Scores = dict[str, float]

DRAW = 5000
"""Each draw takes at most this many records a side for all measures but the Fréchet distance (Xie
et al. 2024, Appendix B.4)."""

FEW = 8
"""With fewer records a side no measure says anything."""

# Points a side in the picture of the embeddings.
MAP_POINTS = 400


def frechet_distance(x_ND: Vectors, y_MD: Vectors) -> float:
    """Return the Fréchet distance of the Gaussians fitted to two sets of embeddings (Heusel et al.
    2017, Eq. 6): `|m_x - m_y|^2 + tr(C_x + C_y - 2 (C_x C_y)^(1/2))`, which is 0 for equal moments.

    It falls with the number of records even where both sets come from one distribution: compare
    sets of one size only, of two records or more.
    """
    x_ND, y_MD = x_ND.astype(np.float64), y_MD.astype(np.float64)
    mean_D = x_ND.mean(axis=0) - y_MD.mean(axis=0)
    c_x, c_y = np.cov(x_ND, rowvar=False), np.cov(y_MD, rowvar=False)
    # tr((C_x C_y)^1/2) is the sum of the square roots of the eigenvalues of a symmetric matrix
    # similar to C_x C_y, which a rounding below 0 cannot make complex.
    root = _root(c_x)
    overlap = np.sqrt(np.maximum(eigvalsh(root @ c_y @ root), 0.0)).sum()
    return float(mean_D @ mean_D + np.trace(c_x) + np.trace(c_y) - 2.0 * overlap)


def cluster_divergences(other_ND: Vectors, real_MD: Vectors, seed: int) -> Scores:
    """Return MAUVE (Pillutla et al. 2021), and KL and total variation of its two histograms.

    `kl` is KL(real || other) in nats; half a record is added to each cluster (Krichevsky and
    Trofimov 1981, as in Pillutla et al. 2023), so that it is finite. All of them depend on the
    number of records. MAUVE is 1 for indistinguishable sets, whose vectors are all the same.
    """
    real_K, other_K = cluster_histograms(real_MD, other_ND, seed)
    real, other = ((side_K + 0.5) / (side_K + 0.5).sum() for side_K in (real_K, other_K))
    return {
        "mauve": divergence_area(real_K, other_K),
        "kl": float((real * np.log(real / other)).sum()),
        "total_variation": float(np.abs(real_K / real_K.sum() - other_K / other_K.sum()).sum() / 2),
    }


def compare_fidelity(
    vectors: Mapping[str, Sequence[Vectors]],
    seeds: int,
    on_progress: OnProgress = lambda progress: None,
) -> dict[str, Any]:
    """Take each measure between the real test records and the synthetic ones, and as the yardstick
    between the real test records and other real ones, over `seeds` draws of equally many a side.

    `vectors` holds synthetic, other real and test embeddings by the name of the embedding model;
    `measures` are the averages over the models, `embedders` each one's own.
    """
    size = min(len(side) for sides in vectors.values() for side in sides)
    found: dict[str, dict[str, list[Scores]]] = {
        name: {"synthetic_to_real": [], "real_to_real": []} for name in vectors
    }
    for seed in range(seeds):
        on_progress(Progress("fidelity", seed, seeds))
        for name, (synthetic, train, test) in vectors.items():
            found[name]["synthetic_to_real"].append(_draw(synthetic, test, size, seed))
            found[name]["real_to_real"].append(_draw(train, test, size, seed))
    return {
        "records_a_side": size,
        "records_a_draw": min(size, DRAW),
        "draws": seeds,
        "neighbours": NEIGHBOURS,
        "measures": _summaries(list(found.values())),
        "embedders": {name: _summaries([scores]) for name, scores in found.items()},
    }


def _draw(other: Vectors, test: Vectors, size: int, seed: int) -> Scores:
    """Take every measure of one draw, which has the same test records in both comparisons."""
    rng = np.random.default_rng(seed)
    x, y = (v[rng.choice(len(v), size, replace=False)] for v in (other, test))
    few_x, few_y = x[:DRAW], y[:DRAW]
    return {
        "frechet_distance": frechet_distance(x, y),
        **precision_recall(few_x, few_y),
        **cluster_divergences(few_x, few_y, seed),
    }


def _summaries(of_models: list[dict[str, list[Scores]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return measure -> comparison -> mean and deviation over draws of the average over models."""
    measures = next(iter(of_models[0].values()))[0]
    return {
        measure: {
            comparison: mean_and_deviation(
                [
                    float(np.mean([scores[measure] for scores in draws]))
                    for draws in zip(*(model[comparison] for model in of_models), strict=True)
                ]
            )
            for comparison in of_models[0]
        }
        for measure in measures
    }


def embedding_map(synthetic_ND: Vectors, real_MD: Vectors) -> dict[str, Any]:
    """Return the first two principal components of `MAP_POINTS` records a side, drawn once:
    `synthetic` and `real` are [x, y] points, `explained` each component's share of the variance.

    Both sides have equally many points, so that the larger set does not choose the view.
    """
    rng = np.random.default_rng(0)
    size = min(MAP_POINTS, len(synthetic_ND), len(real_MD))
    drawn = [v[rng.choice(len(v), size, replace=False)] for v in (synthetic_ND, real_MD)]
    pca = PCA(n_components=2, svd_solver="full").fit(np.vstack(drawn))
    made, real = (pca.transform(v).round(4).tolist() for v in drawn)
    # Where all vectors are the same there is no variance: 0 / 0.
    explained = np.nan_to_num(pca.explained_variance_ratio_).round(4).tolist()
    return {"synthetic": made, "real": real, "explained": explained}


def _root(matrix: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
