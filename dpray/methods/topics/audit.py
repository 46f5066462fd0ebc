"""The audit of topics bounds the epsilon of their histogram."""

from __future__ import annotations

from collections.abc import Iterator

from dpray.auditing.shared_targets import votes_target
from dpray.auditing.target import Target
from dpray.methods.topics.algorithm import TopicHistogram


def targets(histogram: TopicHistogram) -> Iterator[Target]:
    yield votes_target("topic histogram", histogram.votes)
