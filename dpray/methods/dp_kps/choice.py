"""DP-KPS has no free parameter; `choose` estimates how many words it would find."""

from __future__ import annotations

import math

from dpray.config.config import Config
from dpray.methods.dp_kps.plan import DpKpsPlan, make_plan
from dpray.methods.dp_kps.settings import DpKpsSettings
from dpray.methods.dp_kps.vocabulary import read_counts
from dpray.runs.choice import Choice, Signal

WORDS = 50.0
"""Enough words to tell topics apart: on AG News a classifier trained on the sequences has an
accuracy of 0.43 with 6 expected words, at eps 1, and of 0.81 with 94, at eps 4."""

MEANING = "words expected above the noise of the vocabulary, S ln |V| / eps"


def choose(config: Config, settings: DpKpsSettings, records: int) -> Choice:
    """Take the settings as they are. Raises InputError if there is no public vocabulary."""
    plan = make_plan(config.model_copy(update={"method": settings}), settings)
    found = words_found(plan)
    signal = None if found is None else Signal(found, WORDS, MEANING)
    return Choice(plan, signal, ("the defaults and what is set: no key is free",))


def words_found(plan: DpKpsPlan) -> int | None:
    """Return the number of public terms whose expected count is above the largest of the |V|
    noises, if the private texts use words as often as the public ones; None if the file of terms
    has no counts."""
    settings, n = plan.settings, plan.config.data.public_size
    counts = list(read_counts(settings.vocabulary, settings.stop_words).values())
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return None
    total, noise = sum(known), plan.method.vocabulary.scale * math.log(len(counts))
    # A record names S terms; one that is in every record is counted once in each.
    expected = [n * min(1.0, settings.phrases_per_record * count / total) for count in known]
    return sum(count > noise for count in expected)
