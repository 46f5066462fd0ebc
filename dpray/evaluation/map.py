"""A picture of where the records lie: embeddings in two dimensions."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.decomposition import PCA

POINTS = 400
"""Points a side."""

_SEED = 0


def embedding_map(synthetic_ND: np.ndarray, real_MD: np.ndarray) -> dict[str, Any]:
    """The first two principal components of `POINTS` records a side, drawn once: `synthetic` and
    `real` are [x, y] points, `explained` the share of the variance of each component.

    Components of equally many of each side, so that the larger set does not choose the view.
    """
    rng = np.random.default_rng(_SEED)
    size = min(POINTS, len(synthetic_ND), len(real_MD))
    drawn = [v[rng.choice(len(v), size, replace=False)] for v in (synthetic_ND, real_MD)]
    pca = PCA(n_components=2, svd_solver="full").fit(np.vstack(drawn))
    made, real = (pca.transform(v).round(4).tolist() for v in drawn)
    # No variance at all, where all vectors are one: 0 / 0.
    explained = np.nan_to_num(pca.explained_variance_ratio_).round(4).tolist()
    return {"synthetic": made, "real": real, "explained": explained}
