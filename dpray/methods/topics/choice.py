"""The free parameter of topics is their number."""

from __future__ import annotations

from dataclasses import replace

from dpray.config.config import Config
from dpray.methods.topics.plan import TopicsPlan, make_plan
from dpray.methods.topics.settings import TopicsSettings
from dpray.runs.plan import Choice, Signal

TOPICS = (200, 100, 50, 20, 10, 5, 2)

RECORDS = 2.0
"""An average count is so many deviations of its noise, as many as the default threshold: noise
alone lifts one empty count in 44 that far."""


def choose(config: Config, settings: TopicsSettings, records: int) -> Choice:
    """Take the most topics whose average count stands above its noise, or the fewest if none does.
    A number that is set stays as it is."""
    is_set = "topics" in settings.model_fields_set
    fewest = settings if is_set else settings.model_copy(update={"topics": TOPICS[-1]})
    plan = make_plan(config.model_copy(update={"method": fewest}), fewest)
    if not is_set:
        # The noise is the same for any number, and so are the public texts.
        tried = (with_topics(plan, number) for number in TOPICS if number <= len(plan.public))
        plan = next((one for one in tried if average(one) >= RECORDS), plan)
    signal = Signal(
        average(plan),
        RECORDS,
        "records of a topic and label, n / (L T), over the deviation of their noise",
    )
    why = "the most whose average count stands above its noise"
    if is_set:
        why = "as it is set"
    elif not signal.is_enough:
        why = "no more have an average count above its noise"
    return Choice(plan, signal, (f"T {plan.settings.topics}: {why}",))


def with_topics(plan: TopicsPlan, number: int) -> TopicsPlan:
    settings = plan.settings.model_copy(update={"topics": number})
    config = plan.config.model_copy(update={"method": settings})
    return replace(plan, config=config, settings=settings)


def average(plan: TopicsPlan) -> float:
    """Return an average count over the deviation of its noise."""
    return plan.config.data.public_size / plan.counts / plan.votes.sigma
