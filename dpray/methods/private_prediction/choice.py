"""The free parameters of private prediction: the clip bound and the batch size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

from dpray.config.config import Config
from dpray.mechanisms.labels import common_shares
from dpray.methods.private_prediction.plan import affords, make_plan, template_of
from dpray.methods.private_prediction.resolved import PrivatePredictionPlan
from dpray.methods.private_prediction.settings import PrivatePredictionSettings
from dpray.runs.choice import Choice, Signal
from dpray.runs.plan import Before
from dpray.types import InputError

CLIP_BOUNDS = (10.0, 5.0, 3.0, 2.0, 1.0)
BATCH_SIZES = (16, 32, 64, 128, 256)

CLIP = {"clip", "clip_bound", "temperature"}
"""These keys go together: where one is set, none is free."""


def choose(
    config: Config,
    settings: PrivatePredictionSettings,
    records: int,
    before: Before | None = None,
) -> Choice:
    """Take dclip at temperature 1 with the largest clip bound that affords the texts: the larger,
    the more a token gains (docs/methods.md). Then take the smallest batches that do, because a text
    costs a prompt for each record of its batch. Keys that are set stay as they are.

    Where nothing affords the texts, take what affords most. Raises InputError where nothing affords
    one.
    """
    tried = list(_tried(config, settings))
    template = template_of(config, settings)  # no key of it is free
    first = None if before is None else before.dp_event
    wanted = settings.texts or records
    enough = (one for one in tried if affords(config, one, template, wanted, first))
    best, refused = _first_plan(config, enough, before)
    if best is None:
        # A smaller clip costs less whatever the batches are.
        least = min(one.clip_bound for one in tried)
        plans = [_first_plan(config, [one], before) for one in tried if one.clip_bound == least]
        made = [plan for plan, _ in plans if plan is not None]
        refused += [error for _, errors in plans for error in errors]
        best = max(made, key=lambda plan: plan.whole_texts, default=None)
    if best is None:
        raise refused[0]
    chosen = best.settings
    what = f"{chosen.clip} with c {chosen.clip_bound:g}, s {chosen.batch_size}, {chosen.batches}: "
    why = "the largest clip, and then the smallest batches, that afford the texts"
    if _is_set(settings, CLIP) and _is_set(settings, {"batch_size"}):
        why = "as they are set"
    elif best.whole_texts < records:
        why = "what affords most"
    affordable = max([best.whole_texts, *best.texts_affordable.values()])
    if not best.texts_affordable and chosen.max_records is not None:
        # Of batches of a given kind the plan says no more than whether the limit is reached.
        without_limit = chosen.model_copy(update={"max_records": None})
        affordable = make_plan(config, without_limit, before).whole_texts
    signal = Signal(affordable, records, "whole texts that epsilon pays for")
    return Choice(best, signal, (what + why,))


def _first_plan(
    config: Config, tried: Iterable[PrivatePredictionSettings], before: Before | None
) -> tuple[PrivatePredictionPlan | None, list[InputError]]:
    """Return the plan of the first settings that have one, and why those before it have none."""
    refused: list[InputError] = []
    for one in tried:
        try:
            return make_plan(config.model_copy(update={"method": one}), one, before), refused
        except InputError as error:
            refused.append(error)
    return None, refused


def _tried(
    config: Config, settings: PrivatePredictionSettings
) -> Iterator[PrivatePredictionSettings]:
    """Yield settings, first those that are better if they afford the texts."""
    clips = [settings.clip_bound]
    free: dict[str, Any] = {}
    if not _is_set(settings, CLIP):
        free, clips = {"clip": "dclip", "temperature": 1.0}, list(CLIP_BOUNDS)
    if settings.batch_size != "auto" and _is_set(settings, {"batch_size"}):
        sizes = [settings.batch_size]
    else:
        rarest = min(common_shares(config.data.proportions).values())
        of_a_label = config.data.public_size * rarest
        sizes = [s for s in BATCH_SIZES if s <= of_a_label] or [max(1, int(of_a_label))]
    for clip_bound, batch_size in product(clips, sizes):
        free |= {"clip_bound": clip_bound, "batch_size": batch_size}
        yield settings.model_copy(update=free)


def _is_set(settings: PrivatePredictionSettings, keys: set[str]) -> bool:
    return not settings.model_fields_set.isdisjoint(keys)
