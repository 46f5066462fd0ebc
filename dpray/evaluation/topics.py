"""Topics: clusters of embeddings, named by their words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sklearn.cluster import KMeans
from sklearn.feature_extraction.text import CountVectorizer

TOPICS = 10
TERMS = 6

MIN_RECORDS = 3
"""A term stands in so many records or more: names that only one record holds are not shown."""

SEED = 0

OUTLIER = -1
"""The cluster of records that are in none."""

OUTLIERS_NAME = "(outliers)"
"""Stands where the other topics have terms."""

Cluster = Callable[[Sequence[str], np.ndarray], np.ndarray]
"""Texts and their embeddings to the cluster of each, an integer."""


def k_means(texts: Sequence[str], vectors_ND: np.ndarray) -> np.ndarray:
    """`TOPICS` clusters with a fixed seed, fewer where records or different vectors are few."""
    different: set[bytes] = set()
    for vector in vectors_ND:
        different.add(vector.tobytes())
        if len(different) == TOPICS:
            break
    k = max(1, min(TOPICS, len(vectors_ND) // 10, len(different)))
    found: np.ndarray = KMeans(n_clusters=k, n_init=3, random_state=SEED).fit_predict(vectors_ND)
    return found


def compare_topics(
    texts: Sequence[Sequence[str]], vectors: Sequence[np.ndarray], cluster: Cluster = k_means
) -> list[dict[str, Any]]:
    """The topics of synthetic, other real and real test records (`texts` and `vectors` in this
    order): top terms, and the share of each set's records. The most common in the test first.

    The topics are the clusters of all records; the terms those of the highest class-based TF-IDF
    (`class_terms`), `OUTLIERS_NAME` for the topic of outliers.
    """
    pooled = [text for side in texts for text in side]
    found = cluster(pooled, np.vstack(vectors))
    clusters, topic_of = np.unique(found, return_inverse=True)
    terms = class_terms(pooled, topic_of, len(clusters))
    if clusters[0] == OUTLIER:
        terms[0] = [OUTLIERS_NAME]
    parts = np.split(topic_of, np.cumsum([len(side) for side in texts])[:-1])
    shares = [np.bincount(part, minlength=len(clusters)) / len(part) for part in parts]
    return [
        {
            "terms": terms[topic],
            "synthetic": float(shares[0][topic]),
            "other_real": float(shares[1][topic]),
            "real": float(shares[2][topic]),
        }
        for topic in np.argsort(-shares[2], kind="stable")
    ]


def class_terms(texts: Sequence[str], topic_of: np.ndarray, topics: int) -> list[list[str]]:
    """The terms with the highest class-based TF-IDF of each topic: `tf_tc log(1 + A / tf_t)`, where
    A is the average number of words of a topic (Grootendorst 2022, Eq. 2). Without English stop
    words."""
    try:
        counter = CountVectorizer(stop_words="english", min_df=MIN_RECORDS)
        counts_NV = counter.fit_transform(texts)
    except ValueError:  # No term is left.
        return [[] for _ in range(topics)]
    names = counter.get_feature_names_out()
    counts_CV = np.stack(
        [np.asarray(counts_NV[topic_of == topic].sum(axis=0)).ravel() for topic in range(topics)]
    )
    weights_CV = counts_CV * np.log1p(counts_CV.sum() / topics / counts_CV.sum(axis=0))
    return [
        [str(names[term]) for term in np.argsort(-row, kind="stable")[:TERMS] if row[term] > 0]
        for row in weights_CV
    ]
