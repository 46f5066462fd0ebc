"""Public texts make topics, and a noisy histogram says how frequent each is among the private
records of a label. Sequences of terms follow from it.

Topics are public, and so is all that follows from the noisy counts.

Shapes: N public texts, T topics, D dimensions of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dpray.accounting.event import Event
from dpray.mechanisms.discrete_noise import Counts
from dpray.mechanisms.labels import largest_remainder
from dpray.mechanisms.topics import Vectors, class_terms, clusters_of
from dpray.mechanisms.votes import VoteHistogram
from dpray.methods.topics.settings import TopicsSettings


@dataclass(frozen=True)
class PublicTopics:
    """The topics of public texts: their `means`, shape (T, D), their `words`, and in `counts` each
    label's number of public texts of every topic, shape (T,)."""

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
    ) -> PublicTopics:
        """Cluster the texts, each of which has a label and a vector; equal arguments give equal
        topics on one machine. There are fewer topics than asked for if fewer vectors differ."""
        topic_of, means = clusters_of(vectors_ND, settings.topics)
        T, of_label = len(means), np.array(labels)
        words = class_terms(texts, topic_of, T, settings.words, min_texts=1)
        counts = {
            label: np.bincount(topic_of[of_label == label], minlength=T)
            for label in dict.fromkeys(labels)
        }
        return cls(means, words, counts)


@dataclass(frozen=True)
class TopicHistogram:
    """The frozen plan of a run; it is public.

    Guarantee: add or remove one unit. A private record adds one to one count, that of its label and
    of the topic whose mean is nearest to its embedding. That is a vote for one of T public vectors,
    and the whole histogram, over the counts of all labels together, is ONE application of `votes`:
    a run costs `dp_event`. The threshold, shares and sequences are post-processing.
    Proof: docs/privacy.md, section 3.6.
    """

    settings: TopicsSettings
    votes: VoteHistogram

    @property
    def dp_event(self) -> Event:
        return self.votes.dp_event

    @property
    def least_count(self) -> float:
        """Return the threshold H as a count of records."""
        return self.settings.threshold * self.votes.sigma

    def shares(self, noisy_T: Counts, public_T: Counts) -> npt.NDArray[np.float64]:
        """Return the topics' shares of a label's sequences: in proportion to the noisy counts that
        are not below H. If no count is left, the label's public texts decide; if it has none, the
        shares are equal."""
        measured_T = np.where(noisy_T < self.least_count, 0, noisy_T)
        for counts_T in (measured_T, public_T):
            if counts_T.any():
                return counts_T / float(counts_T.sum())
        return np.full(len(noisy_T), 1 / len(noisy_T))

    def sequences(
        self, number: int, noisy_T: Counts, public_T: Counts, words: Sequence[Sequence[str]]
    ) -> list[Sequence[str]]:
        """Return `number` sequences of a label, each of them the words of a topic."""
        shares = dict(enumerate(self.shares(noisy_T, public_T)))
        copies = largest_remainder(number, shares)
        return [words[topic] for topic, times in copies.items() for _ in range(times)]
