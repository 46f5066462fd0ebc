"""`compare_topics` compares the topics of synthetic and real records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sklearn.feature_extraction.text import CountVectorizer

from dpray.mechanisms.topics import SEED, class_terms, clusters_of
from dpray.types import InputError

TOPICS = 10
TERMS = 6

MIN_RECORDS = 3
"""A term occurs in at least this many records: a name that only one record holds is not shown."""

OUTLIER = -1
"""A clustering gives this number to records that belong to no cluster."""

OUTLIERS_NAME = "(outliers)"

UMAP_SETTINGS = {"n_neighbors": 15, "n_components": 5, "min_dist": 0.0, "metric": "cosine"}
"""These are BERTopic's own settings, which have no seed."""

Cluster = Callable[[Sequence[str], np.ndarray], np.ndarray]
"""A `Cluster` takes texts and their embeddings and returns the number of each text's cluster."""


def k_means(texts: Sequence[str], vectors_ND: np.ndarray) -> np.ndarray:
    """Make `TOPICS` clusters, or fewer where records are few or few vectors differ."""
    return clusters_of(vectors_ND, max(1, min(TOPICS, len(vectors_ND) // 10)))[0]


def load_bertopic() -> Cluster:
    """Return BERTopic (Grootendorst 2022), UMAP followed by HDBSCAN, with a fixed seed. Its topics
    are merged until `TOPICS` + 1 are left, the outliers' included.

    Its terms are not used, because its minimum count of a term is over topics, not records. Raises
    InputError where BERTopic, the extra `dpray[bertopic]`, is not installed.
    """
    try:
        from bertopic import BERTopic
        from umap import UMAP
    except ImportError:
        raise InputError(
            "topics: BERTopic is not installed: pip install 'dpray[bertopic]'"
        ) from None

    def cluster(texts: Sequence[str], vectors_ND: np.ndarray) -> np.ndarray:
        model = BERTopic(
            # For English it would keep Latin letters only, and fail where there are none.
            language="multilingual",
            vectorizer_model=CountVectorizer(token_pattern=r"\S+"),
            # Without n_jobs UMAP warns that a seed leaves it one thread.
            umap_model=UMAP(**UMAP_SETTINGS, random_state=SEED, n_jobs=1),
            nr_topics=TOPICS + 1,
        )
        return np.array(model.fit_transform(texts, vectors_ND)[0])

    return cluster


def compare_topics(
    texts: Sequence[Sequence[str]], vectors: Sequence[np.ndarray], cluster: Cluster = k_means
) -> list[dict[str, Any]]:
    """Return the topics of synthetic, other real and real test records (`texts` and `vectors` in
    this order): each one's terms and its share of each set, the most common in the test first.

    The topics are the clusters of all records together; their terms have the highest class-based
    TF-IDF (`class_terms`), and the topic of outliers is called `OUTLIERS_NAME`.
    """
    pooled = [text for side in texts for text in side]
    found = cluster(pooled, np.vstack(vectors))
    clusters, topic_of = np.unique(found, return_inverse=True)
    terms = class_terms(pooled, topic_of, len(clusters), TERMS, MIN_RECORDS)
    if clusters[0] == OUTLIER:
        terms[0] = [OUTLIERS_NAME]
    parts = np.split(topic_of, np.cumsum([len(side) for side in texts])[:-1])
    made, other, real = (np.bincount(part, minlength=len(clusters)) / len(part) for part in parts)
    return [
        {
            "terms": terms[topic],
            "synthetic": float(made[topic]),
            "other_real": float(other[topic]),
            "real": float(real[topic]),
        }
        for topic in np.argsort(-real, kind="stable")
    ]
