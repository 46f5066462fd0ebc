"""Topics are clusters of public texts. A noisy histogram measures how frequent each topic is among
the private records of a label, and sequences of terms are made from it.

Topics are public, and so is everything made from the noisy counts.

Shapes: N public texts, T topics, D dimensions of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dpray.mechanisms.discrete_noise import Counts
from dpray.mechanisms.labels import largest_remainder
from dpray.mechanisms.topics import SplitWords, Vectors, class_terms, clusters_of
from dpray.methods.topics.settings import TopicsSettings


@dataclass(frozen=True)
class PublicTopics:
    """The topics of public texts: their `means`, shape (T, D), their `words`, and by label the
    `counts` of public texts in each topic, shape (T,)."""

    means: Vectors = field(repr=False)
    words: Sequence[Sequence[str]]
    counts: Mapping[str, Counts]

    @classmethod
    def of(
        cls,
        texts: Sequence[str],
        labels: Sequence[str],
        vectors_ND: Vectors,
        settings: TopicsSettings,
        words_in: SplitWords | None = None,
    ) -> PublicTopics:
        """Cluster the texts; `labels` and `vectors_ND` have an entry for each. `words_in` splits a
        text into words. Equal arguments give
        equal topics on one machine. If few vectors differ, there are fewer than
        `settings.topics`."""
        topic_of, means = clusters_of(vectors_ND, settings.topics)
        T, of_label = len(means), np.array(labels)
        words = class_terms(texts, topic_of, T, settings.words, 1, words_in)
        counts = {
            label: np.bincount(topic_of[of_label == label], minlength=T)
            for label in dict.fromkeys(labels)
        }
        return cls(means, words, counts)


def sequences(
    number: int,
    noisy_T: npt.ArrayLike,
    public_T: npt.ArrayLike,
    words: Sequence[Sequence[str]],
    least_count: float,
) -> list[Sequence[str]]:
    """Return `number` sequences of a label; each consists of the words of one topic.

    Topics are in proportion to the noisy counts of at least `least_count`. If there is no such
    count, they are in proportion to the label's public texts; if it has none, all are equal.
    """
    counts_T = np.asarray(noisy_T)
    measured_T = np.where(counts_T < least_count, 0, counts_T)
    for weights_T in (measured_T, np.asarray(public_T), np.ones_like(counts_T)):
        if weights_T.any():
            break
    copies = largest_remainder(number, dict(enumerate(weights_T / float(weights_T.sum()))))
    return [words[topic] for topic, times in copies.items() for _ in range(times)]
