"""The free parameters of Aug-PE: how many texts stand for election, and how often."""

from __future__ import annotations

from dataclasses import replace

from dpray.config.config import Config
from dpray.methods.aug_pe.plan import AugPePlan, make_plan
from dpray.methods.aug_pe.settings import AugPeSettings
from dpray.runs.choice import Choice, Signal

ITERATIONS = (10, 8, 6, 5, 4, 3, 2, 1)
VARIATIONS = (7, 4, 2)

VOTES = 1.0
"""Enough votes of an average text, in standard deviations of their noise: below it, the noise
chooses most winners."""


def choose(config: Config, settings: AugPeSettings, records: int) -> Choice:
    """Take the most new variations in all, iterations before variations of one, whose votes stand
    above their noise; if none do, what comes nearest. Keys that are set stay as they are."""
    given = settings.model_fields_set
    iterations = [settings.iterations] if "iterations" in given else ITERATIONS
    variations = [settings.variations] if "variations" in given else VARIATIONS
    plans = []
    for t in iterations:
        # The noise is that of T votes, whatever stands for election.
        plan = _plan(config, settings.model_copy(update={"iterations": t}))
        plans += [_varied(plan, number) for number in variations]
    above = [plan for plan in plans if votes(plan) >= VOTES]
    best = max(above, key=new_texts, default=None) or max(plans, key=votes)
    chosen = best.settings
    what = f"T {chosen.iterations}, L {chosen.variations}: "
    why = "the most variations whose votes stand above the noise"
    if given >= {"iterations", "variations"}:
        why = "as they are set"
    elif not above:
        why = "the votes that come nearest to their noise"
    meaning = "votes a text, n / (n_syn L), over their noise"
    return Choice(best, Signal(votes(best), VOTES, meaning), (what + why,))


def _plan(config: Config, settings: AugPeSettings) -> AugPePlan:
    return make_plan(config.model_copy(update={"method": settings}), settings)


def _varied(plan: AugPePlan, variations: int) -> AugPePlan:
    settings = plan.settings.model_copy(update={"variations": variations})
    return replace(
        plan, config=plan.config.model_copy(update={"method": settings}), settings=settings
    )


def new_texts(plan: AugPePlan) -> tuple[int, int]:
    settings = plan.settings
    return settings.iterations * max(1, settings.variations - 1), settings.iterations


def votes(plan: AugPePlan) -> float:
    """Return n / (n_syn L sigma), times the sum of the weights of a record's votes: the votes of a
    text over their noise."""
    assert plan.votes is not None
    candidates = plan.settings.records * plan.settings.variations
    cast = plan.config.data.public_size * sum(plan.votes.weights)
    return cast / (candidates * plan.votes.sigma)
