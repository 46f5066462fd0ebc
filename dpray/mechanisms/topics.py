"""Topics are clusters of embeddings, named by words of their texts.

Shapes: N texts, T topics, D dimensions of an embedding, V words.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix
from sklearn.cluster import KMeans
from sklearn.feature_extraction.text import CountVectorizer

from dpray.mechanisms.term_matcher import TermMatcher

SEED = 0

WORD = r"\b[^\W\d]\w+\b"
"""Words begin with a letter: a number names no topic."""

Vectors = npt.NDArray[np.float32]
Clusters = npt.NDArray[np.integer]


def clusters_of(vectors_ND: Vectors, most: int) -> tuple[Clusters, Vectors]:
    """Cluster the vectors by k-means with a fixed seed, into `most` clusters, or fewer if fewer
    vectors differ. Return each vector's cluster, shape (N,), and the means, shape (T, D)."""
    different: set[bytes] = set()
    for vector in vectors_ND:
        different.add(vector.tobytes())
        if len(different) == most:
            break
    clusters = KMeans(n_clusters=len(different), n_init=3, random_state=SEED).fit(vectors_ND)
    return clusters.labels_, clusters.cluster_centers_


SplitWords = Callable[[str], list[str]]
"""Splits a text into the words that may name a topic."""


def words_of(stop_words: Collection[str] | None = None, terms: Sequence[str] = ()) -> SplitWords:
    """Return the function that splits a text into words, in lower case: each begins with a letter,
    has at least two characters and is no stop word, by default no English one. With `terms`, for a
    script without spaces, the words are the terms that the text holds."""
    if terms:
        matcher = TermMatcher([term for term in terms if term not in (stop_words or ())])
        return lambda text: [matcher.terms[term] for term in matcher.matches(text)]
    english = "english" if stop_words is None else None
    split: SplitWords = CountVectorizer(stop_words=english, token_pattern=WORD).build_analyzer()
    return lambda text: [word for word in split(text) if word not in (stop_words or ())]


def class_terms(
    texts: Sequence[str],
    topic_of: Clusters,
    topics: int,
    number: int,
    min_texts: int,
    words: SplitWords | None = None,
) -> list[list[str]]:
    """Return each topic's `number` words with the highest class-based TF-IDF, `tf_tc log(1 + A /
    tf_t)` with A the average number of words per topic (Grootendorst 2022, Eq. 2), of those that
    `words`, or `words_of()`, finds in at least `min_texts` texts.

    >>> texts = ["goal and match", "match", "stock price"]
    >>> class_terms(texts, np.array([0, 0, 1]), topics=2, number=2, min_texts=1)
    [['match', 'goal'], ['price', 'stock']]
    """
    try:
        counter = CountVectorizer(analyzer=words or words_of(), min_df=min_texts)
        counts_NV = counter.fit_transform(texts)
    except ValueError:  # No word is left.
        return [[] for _ in range(topics)]
    names = counter.get_feature_names_out()
    # Sparse: a dense matrix of many topics and words would not fit into memory.
    is_of_TN = csr_matrix((np.ones_like(topic_of), (topic_of, np.arange(len(topic_of)))))
    is_of_TN.resize(topics, len(topic_of))
    counts_TV = is_of_TN @ counts_NV
    totals_V = np.asarray(counts_TV.sum(axis=0)).ravel()
    factors_V = np.log1p(totals_V.sum() / topics / totals_V)
    weights = (row.toarray().ravel() * factors_V for row in counts_TV)
    return [
        [str(names[word]) for word in np.argsort(-row, kind="stable")[:number] if row[word] > 0]
        for row in weights
    ]
