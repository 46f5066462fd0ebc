"""The free parameter of topics is their number."""

from __future__ import annotations

from dataclasses import replace

from dpray.config.config import Config
from dpray.methods.topics.algorithm import TopicHistogram
from dpray.methods.topics.plan import TopicsPlan, make_plan
from dpray.methods.topics.settings import TopicsSettings
from dpray.runs.choice import Choice, Signal

TOPICS = (200, 100, 50, 20, 10, 5, 2)

RECORDS = 2.0
"""An average count is so many deviations of its noise, as many as the default threshold: noise
alone lifts one empty count in 44 that far."""

MEANING = "records of a topic and label, n / (L T), over the deviation of their noise"


def choose(config: Config, settings: TopicsSettings, records: int) -> Choice:
    """Take the most topics whose average count stands above its noise; where none does, the fewest.
    A number that is set stays as it is."""
    given = "topics" in settings.model_fields_set
    fewest = settings if given else settings.model_copy(update={"topics": TOPICS[-1]})
    plan = make_plan(config.model_copy(update={"method": fewest}), fewest)
    if not given:
        # The noise is the same for any number, and so are the public texts.
        tried = (with_topics(plan, number) for number in TOPICS if number <= len(plan.public))
        plan = next((one for one in tried if signal(one) >= RECORDS), plan)
    found = Signal(signal(plan), RECORDS, MEANING)
    why = "the most whose average count stands above its noise"
    if not found.is_enough:
        why = "no more have an average count above its noise"
    reason = f"T {plan.settings.topics}: {'as it is set' if given else why}"
    return Choice(plan, found, (reason,))


def with_topics(plan: TopicsPlan, number: int) -> TopicsPlan:
    settings = plan.settings.model_copy(update={"topics": number})
    config = plan.config.model_copy(update={"method": settings})
    method = TopicHistogram(settings, plan.method.votes)
    return replace(plan, config=config, settings=settings, method=method)


def signal(plan: TopicsPlan) -> float:
    return plan.config.data.public_size / plan.counts / plan.method.votes.sigma
