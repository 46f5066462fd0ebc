"""The most private tokens of a batch, and the most texts, that epsilon affords."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from dpray.accounting.accountant import calibrate
from dpray.mechanisms.labels import common_shares
from dpray.runs.plan import is_within_epsilon
from dpray.types import InputError

if TYPE_CHECKING:  # a plan asks for the numbers below
    from dpray.methods.private_prediction.plan import PrivatePredictionPlan

MOST = 10_000_000
"""The most private tokens of a batch, and the most texts, that are looked for."""

LARGER = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
SHORTER = (0.75, 0.5, 0.25, 0.125)
"""The sizes of batches and the lengths of texts that are tried, as parts of those in a plan."""


class TooExpensive(InputError):
    """A plan of the least size, which is `what`, costs more than `privacy.epsilon`. Its cost is
    computed when the message is read: that may take seconds, and a comparison reads one of many."""

    def __init__(self, least: PrivatePredictionPlan, what: str) -> None:
        super().__init__(least, what)
        self.least, self.what = least, what

    def _message(self) -> str:
        return (
            f"privacy.epsilon: {self.least.config.privacy.epsilon:g} does not pay for {self.what}, "
            f"which costs {self.least.cost.epsilon:.4f}; a larger method.batch_size or "
            "method.temperature is needed"
        )


def largest_affordable(
    plan_of: Callable[[int], PrivatePredictionPlan], most: int, what: str
) -> PrivatePredictionPlan:
    """Return the plan of the largest number, up to `most`, that costs at most `privacy.epsilon`.
    Raises InputError if 1, which is `what`, costs more."""
    least = plan_of(1)
    privacy = least.config.privacy
    # Asked first: a search would come to 1 last.
    if not is_within_epsilon(least):
        raise TooExpensive(least, what)
    number = calibrate(
        lambda number: plan_of(int(number)).dp_event,
        privacy.epsilon,
        privacy.delta,
        bracket=(1, max(most, 2)),
        increasing=True,
        integer=True,
    )
    return plan_of(int(number))


def with_batches(base: PrivatePredictionPlan) -> PrivatePredictionPlan:
    """Return the plan with the batches that its settings ask for; for `auto`, with those that
    afford more texts. Raises InputError if the epsilon, less what comes before, does not pay for
    one token, or one text."""
    settings = base.settings
    if settings.batches != "auto":
        return _affordable(base)
    plans: dict[str, PrivatePredictionPlan] = {}
    refused: list[InputError] = []
    for kind in ("poisson", "disjoint"):
        without_limit = settings.model_copy(update={"batches": kind, "max_records": None})
        try:
            plans[kind] = _affordable(replace(base, settings=without_limit))
        except InputError as error:
            refused.append(error)
    if not plans:
        raise refused[0]
    affordable = {kind: plan.whole_texts for kind, plan in plans.items()}
    best = max(affordable, key=affordable.__getitem__)
    chosen = settings.model_copy(update={"batches": best})
    if settings.max_records is not None and affordable[best] >= settings.max_records:
        return _affordable(replace(base, settings=chosen, texts_affordable=affordable))
    return replace(plans[best], settings=chosen, texts_affordable=affordable)


def _affordable(base: PrivatePredictionPlan) -> PrivatePredictionPlan:
    """Return the plan with the tokens of a disjoint batch, or the texts of Poisson batches: as many
    as its settings ask for, or the most that the epsilon pays for."""
    settings, measured = base.settings, base.config.data.label_proportions == "measured"
    if fault := settings.wrong_batches(settings.batches, measured):
        raise InputError(f"method.{fault}")
    if settings.batches == "disjoint":
        if settings.private_tokens is not None:
            return replace(base, private_tokens=settings.private_tokens)
        most = MOST
        if settings.max_records is not None:
            texts = settings.texts_of_a_batch(most, base.batches.num_batches)
            most = texts * settings.document_tokens
        what = "one private token"
        return largest_affordable(lambda r: replace(base, private_tokens=r), most, what)
    # The schema's own tokens are not drawn from private rows.
    tokens = settings.private_tokens or base.private_tokens_of_a_text

    def poisson(texts: int) -> PrivatePredictionPlan:
        return replace(base, private_tokens=tokens, texts=texts)

    if settings.texts is not None:
        return poisson(settings.texts)
    if settings.max_records is not None:
        wanted = poisson(settings.max_records)
        if is_within_epsilon(wanted):
            return wanted
    what = f"one Poisson batch of {tokens} private tokens of each label"
    return largest_affordable(poisson, MOST, what)


def affords(base: PrivatePredictionPlan, texts: int) -> bool:
    """Return whether epsilon pays for `texts` texts, with any kind of batches that may be chosen.

    This evaluates the cost once for each kind of batches; the largest affordable number takes
    dozens of evaluations.
    """
    for kind, key in (("disjoint", "max_records"), ("poisson", "texts")):
        if base.settings.batches not in (kind, "auto"):
            continue
        changes = {"batches": kind, "max_records": None, "texts": None, key: texts}
        settings = base.settings.model_copy(update=changes)
        if kind == "disjoint" and settings.private_tokens is None:
            batches = replace(base, settings=settings).batches.num_batches
            tokens = math.ceil(texts / batches) * base.private_tokens_of_a_text
            settings = settings.model_copy(update={"private_tokens": tokens})
        with suppress(InputError):
            plan = with_batches(replace(base, settings=settings))
            if plan.whole_texts >= texts and is_within_epsilon(plan):
                return True
    return False


def costs_the_same(plan: PrivatePredictionPlan, texts: int) -> bool:
    """Return whether a plan of more texts costs no more, and makes them all."""
    settings = plan.settings.model_copy(update=plan.open_keys | {"max_records": texts})
    with suppress(InputError):
        more = with_batches(replace(plan, settings=settings, texts=None))
        return more.whole_texts >= texts and more.cost.epsilon <= plan.cost.epsilon
    return False


def one_key(plan: PrivatePredictionPlan, wanted: int) -> str:
    """Return the one key to turn so that a plan makes all texts that are asked for: larger batches
    first, which cost only time, then shorter texts, and a larger epsilon last."""
    s, drawn = plan.settings.expected_batch_size, plan.settings.max_tokens
    rarest = min(common_shares(plan.proportions).values())
    sizes = (math.ceil(more * s) for more in LARGER)
    lengths = (int(less * drawn) for less in SHORTER)

    def pays(**changes: int) -> bool:
        settings = plan.settings.model_copy(update=plan.open_keys | changes)
        return affords(replace(plan, settings=settings), wanted)

    for size in sizes:
        if size <= plan.config.data.public_size * rarest and pays(batch_size=size):
            return f"method.batch_size={size} pays for all, and takes {size / s:.1f} times as long"
    for length in lengths:
        if length and pays(max_tokens=length):
            return f"method.max_tokens={length} pays for all, which are then shorter"
    if plan.config.data.max_records_per_unit > 1:
        data = plan.config.data.model_copy(update={"max_records_per_unit": 1})
        settings = plan.settings.model_copy(update=plan.open_keys)
        of_one = replace(
            plan, config=plan.config.model_copy(update={"data": data}), settings=settings
        )
        for texts, paid in ((wanted, "all"), (plan.whole_texts + 1, "more")):
            if affords(of_one, texts):
                return f"data.max_records_per_unit=1 pays for {paid}"
    if not plan.whole_texts:
        return "raise privacy.epsilon"
    return "raise privacy.epsilon, or ask for fewer texts by method.max_records"
