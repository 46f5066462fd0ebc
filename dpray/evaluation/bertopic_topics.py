"""Topics by BERTopic (Grootendorst 2022): UMAP, then HDBSCAN. An extra, `dpray[bertopic]`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sklearn.feature_extraction.text import CountVectorizer

from dpray.evaluation.topics import SEED, TOPICS, Cluster
from dpray.types import InputError

UMAP_SETTINGS = {"n_neighbors": 15, "n_components": 5, "min_dist": 0.0, "metric": "cosine"}
"""BERTopic's own, which has no seed."""


def load_bertopic() -> Cluster:
    """BERTopic as a `Cluster`, with a fixed seed: its topics, merged until `TOPICS` + 1 are left,
    the outliers' counted. Raises InputError where it is not installed.

    Terms are not taken from it: its least number of records for a term would be one of topics.
    """
    try:
        from bertopic import BERTopic
        from umap import UMAP
    except ImportError:
        raise InputError(
            "topics: BERTopic is not installed: pip install 'dpray[bertopic]'"
        ) from None

    def cluster(texts: Sequence[str], vectors_ND: np.ndarray) -> np.ndarray:
        # Without n_jobs UMAP warns that a seed leaves it one thread.
        umap = UMAP(**UMAP_SETTINGS, random_state=SEED, n_jobs=1)
        model = BERTopic(
            # Of English alone it would keep Latin letters only, and fail where there are none.
            language="multilingual",
            vectorizer_model=CountVectorizer(token_pattern=r"\S+"),
            umap_model=umap,
            nr_topics=TOPICS + 1,
        )
        found, _ = model.fit_transform(texts, vectors_ND)
        return np.array(found)

    return cluster
