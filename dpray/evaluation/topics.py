"""Topics are clusters of embeddings, named by their words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sklearn.cluster import KMeans
from sklearn.feature_extraction.text import CountVectorizer

from dpray.types import InputError

TOPICS = 10
TERMS = 6
SEED = 0

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
    """Make `TOPICS` clusters with a fixed seed, fewer of few records or few different vectors."""
    different: set[bytes] = set()
    for vector in vectors_ND:
        different.add(vector.tobytes())
        if len(different) == TOPICS:
            break
    k = max(1, min(TOPICS, len(vectors_ND) // 10, len(different)))
    found: np.ndarray = KMeans(n_clusters=k, n_init=3, random_state=SEED).fit_predict(vectors_ND)
    return found


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
    terms = class_terms(pooled, topic_of, len(clusters))
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


def class_terms(texts: Sequence[str], topic_of: np.ndarray, topics: int) -> list[list[str]]:
    """Return each topic's terms with the highest class-based TF-IDF, `tf_tc log(1 + A / tf_t)` with
    A the average number of words per topic (Grootendorst 2022, Eq. 2), without English stop words.
    """
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
