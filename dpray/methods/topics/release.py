"""Topics are measured by one noisy histogram, and sequences of terms are made from it.

The histogram is published once, together with its topics: another machine may cluster slightly
differently. A run that is interrupted before clusters again, because topics are public.
"""

from __future__ import annotations

import numpy as np

from dpray.io.languages import topic_words
from dpray.mechanisms.discrete_noise import INTEGER_NOISE_SOURCE
from dpray.mechanisms.labels import largest_remainder
from dpray.mechanisms.topics import words_of
from dpray.methods.topics.algorithm import PublicTopics, sequences
from dpray.methods.topics.plan import TopicsPlan
from dpray.runs.privacy_report import MethodPart, TopicCounts
from dpray.runs.session import Release, Session
from dpray.types import Json
from dpray.workers.shards import Shards, Voters, embedded, noisy_votes

TopicsSession = Session[TopicsPlan]


def release(session: TopicsSession) -> Release:
    """Count the private records of each label and topic, with noise, and make sequences."""
    plan, found = session.plan, measured(session)
    data, wanted = session.config.data, largest_remainder(plan.settings.records, plan.proportions)
    records = [
        {"text": " ".join(words), "label": data.released_label(label), "terms": words}
        for label, number in wanted.items()
        for words in sequences(
            number,
            found["noisy"][label],
            found["public"][label],
            found["words"],
            plan.least_count,
        )
    ]
    return Release(records, report(session, found))


def measured(session: TopicsSession) -> Json:
    """Return the published measurement: the topics' `words`, and for each label and topic the
    number of `public` texts and the `noisy` count of private records."""
    if (found := session.published("topics")) is not None:
        return found
    plan = session.plan
    session.show("embedding records")
    # On Ray, voters get no GPUs: those of a run are for its language model.
    with session.voters() as voters:
        session.show("topics")
        texts, labels = zip(*((r["text"], r["label"]) for r in plan.public), strict=True)
        vectors_ND = embedded(voters, texts, session.config.embedder)
        words_in = words_of(*topic_words(session.config.data.language))
        topics = PublicTopics.of(texts, labels, vectors_ND, plan.settings, words_in)
        return session.publish_once("topics", histogram, plan, voters, topics)


def histogram(plan: TopicsPlan, voters: Shards[Voters], topics: PublicTopics) -> Json:
    """Count the private records of each label and topic, with noise."""
    noisy = noisy_votes(voters, plan.votes, dict.fromkeys(plan.proportions, topics.means))
    none_T = np.zeros(len(topics.words), dtype=np.int64)
    return {
        "words": topics.words,
        "public": {label: topics.counts.get(label, none_T).tolist() for label in noisy},
        "noisy": {label: counts_T.tolist() for label, counts_T in noisy.items()},
    }


def report(session: TopicsSession, found: Json) -> MethodPart:
    plan = session.plan
    return MethodPart(
        llm_calls=0,
        noise_multiplier=plan.noise_multiplier,
        topics=[
            TopicCounts(
                words=words, counts={label: noisy[t] for label, noisy in found["noisy"].items()}
            )
            for t, words in enumerate(found["words"])
        ],
        sampling={
            "histogram": "each private record adds one to the count of its label and of the topic "
            "that is nearest to it; all counts get noise once, in one place",
            "embeddings": "each private text is embedded by itself; no language model reads it "
            "here",
            "sequences": "post-processing: topics in proportion to their noisy counts",
        },
        public_inputs={
            "public": plan.settings.public,
            "embedder": session.config.embedder.shown,
        },
        noise_source=INTEGER_NOISE_SOURCE,
    )
