"""Private prediction's free keys are chosen for a number of texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from dpray.config.config import Config
from dpray.mechanisms.labels import common_shares
from dpray.methods.private_prediction.plan import PrivatePredictionPlan, affords, make_plan
from dpray.methods.private_prediction.prompts import template_of
from dpray.methods.private_prediction.settings import PrivatePredictionSettings
from dpray.runs.plan import Choice, Signal
from dpray.types import InputError

CLIP_BOUNDS = (10.0, 5.0, 3.0, 2.0, 1.0)
BATCH_SIZES = (16, 32, 64, 128, 256)

CLIP = {"clip", "clip_bound", "temperature"}
"""These keys go together: if one is set, none is free."""


def choose(config: Config, settings: PrivatePredictionSettings, records: int) -> Choice:
    """Take dclip at temperature 1 with the largest clip bound that affords the texts: the larger,
    the more a token gains (docs/private_prediction.md). Then take the smallest batches that do,
    because a text costs a prompt for each record of its batch. Keys that are set stay as they are.

    If nothing affords the texts, take what affords most. Raises InputError if nothing affords one.
    """
    candidates = list(_candidates(config, settings))
    template = template_of(config, settings)  # no key of it is free
    base = PrivatePredictionPlan(config, config.data.proportions, settings, 1, template)
    wanted = settings.texts or records
    refused: list[InputError] = []

    def plan_of(each: PrivatePredictionSettings) -> PrivatePredictionPlan | None:
        try:
            return make_plan(config.model_copy(update={"method": each}), each)
        except InputError as error:
            refused.append(error)
            return None

    def pays(each: PrivatePredictionSettings, texts: int) -> bool:
        return affords(replace(base, settings=each), texts)

    found = _largest_clip(candidates, lambda each: pays(each, wanted))
    best = None if found is None else plan_of(found)
    if best is None:
        least = min(each.clip_bound for each in candidates)
        cheapest = [each for each in candidates if each.clip_bound == least]
        best = _most(cheapest, pays, plan_of)
    if best is None:
        raise refused[0]
    chosen, affordable = best.settings, max([best.whole_texts, *best.texts_affordable.values()])
    if not best.texts_affordable and chosen.max_records is not None:
        # Of batches of a given kind the plan says no more than whether the limit is reached.
        without_limit = chosen.model_copy(update={"max_records": None})
        affordable = make_plan(config, without_limit).whole_texts
    signal = Signal(affordable, records, "whole texts that epsilon pays for")
    return Choice(best, signal, (_reason(settings, best, records),))


def _largest_clip(
    candidates: Sequence[PrivatePredictionSettings],
    pays: Callable[[PrivatePredictionSettings], bool],
) -> PrivatePredictionSettings | None:
    """Return the largest clip bound that pays, with the smallest batches. A smaller clip costs less
    whatever the batches are, so batches of a size are asked about only if smaller ones pay for no
    clip that is as large, and no more once they do not pay."""
    best: PrivatePredictionSettings | None = None
    refused: set[int | str] = set()
    for each in sorted(candidates, key=lambda each: (each.batch_size, each.clip_bound)):
        if best is not None and each.clip_bound <= best.clip_bound:
            continue
        if each.batch_size not in refused and pays(each):
            best = each
        else:
            refused.add(each.batch_size)
    return best


def _most(
    cheapest: Sequence[PrivatePredictionSettings],
    pays: Callable[[PrivatePredictionSettings, int], bool],
    plan_of: Callable[[PrivatePredictionSettings], PrivatePredictionPlan | None],
) -> PrivatePredictionPlan | None:
    """Return the first plan of those that afford most. Larger batches usually afford more: they are
    planned first, so that one cost rules out most of the others."""
    best: PrivatePredictionPlan | None = None
    for each in reversed(cheapest):
        if pays(each, 1 if best is None else best.whole_texts):
            best = plan_of(each) or best
    # What is affordable may be less than a whole text.
    plans = [best] if best is not None else filter(None, map(plan_of, cheapest))
    return max(plans, key=lambda plan: plan.whole_texts, default=None)


def _reason(settings: PrivatePredictionSettings, best: PrivatePredictionPlan, records: int) -> str:
    chosen = best.settings
    what = f"{chosen.clip} with c {chosen.clip_bound:g}, s {chosen.batch_size}, {chosen.batches}"
    if _is_set(settings, CLIP) and _is_set(settings, {"batch_size"}):
        return f"{what}: as they are set"
    if best.whole_texts < records:
        return f"{what}: what affords most"
    return f"{what}: the largest clip, and then the smallest batches, that afford the texts"


def _candidates(
    config: Config, settings: PrivatePredictionSettings
) -> Iterator[PrivatePredictionSettings]:
    """Yield settings, first those that are better if they afford the texts."""
    clips = [settings.clip_bound]
    free: dict[str, object] = {}
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
