"""The plan of private prediction, and `make_plan`, which resolves a configuration to it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from dpray.accounting.event import Event
from dpray.auditing.target import Target
from dpray.config.config import Config
from dpray.engines.row_variation import rounding_warnings
from dpray.io.public_files import read_few_shot
from dpray.mechanisms.batches import HashPartition, PoissonBatches
from dpray.mechanisms.labels import common_shares, largest_remainder
from dpray.methods.private_prediction.affordable import (
    BatchMemory,
    affordable_batch_size,
    largest_affordable,
    usual_rows,
)
from dpray.methods.private_prediction.algorithm import PrivatePrediction
from dpray.methods.private_prediction.prompts import PromptTemplate, load_template
from dpray.methods.private_prediction.settings import PrivatePredictionSettings
from dpray.methods.private_prediction.token import PrivateToken
from dpray.runs.plan import Before, Handed, Plan, TokenLimit
from dpray.types import InputError
from dpray.workers.rows import TextOf

MOST_PRIVATE_TOKENS = MOST_TEXTS = 10_000_000

RESTATED = {"threshold", "noise", "sure_probability", "sure_entropy"}
"""These fields of a mechanism are in a plan's summary as the sections they come from."""

SUMMARISED = {
    "batches", "public_gate", "sparse_vector", "max_tokens", "max_prompt_tokens", "max_copies",
    "longest_copy",
}  # fmt: skip
"""These keys are in a plan's summary beside the mechanism's."""


@dataclass(frozen=True)
class PrivatePredictionPlan(Plan):
    """A run's charge, its expected output, and the targets of its audit.

    `settings.batches` is never "auto", and `config.engine.dtype` is what the model computes in.
    `private_tokens` is a batch's, and `texts` the number of texts from Poisson batches, None with
    disjoint ones. `salt` is the partition's, "" in a plan that is not run. `texts_affordable` is
    the number of texts that the epsilon pays for with each kind of batches that was considered.
    `memory` is what a batch takes on this machine, None if the model's files are not here.
    """

    settings: PrivatePredictionSettings
    private_tokens: int
    template: PromptTemplate
    texts: int | None = None
    texts_affordable: Mapping[str, int] = field(default_factory=dict)
    memory: BatchMemory | None = None
    salt: str = ""

    @property
    def disjoint(self) -> bool:
        return self.texts is None

    # What is charged

    @property
    def method_event(self) -> Event:
        mechanism = self.method.mechanism
        if isinstance(self.batches, PoissonBatches):
            return self.batches.dp_event(
                mechanism.sampler.dp_event, self.private_tokens, mechanism.records_per_unit
            )
        return self.method.dp_event

    @cached_property
    def batches(self) -> HashPartition | PoissonBatches:
        size, s = self.config.data.public_size, self.settings.expected_batch_size
        if self.texts is None:
            return HashPartition.expected(size, self.proportions, s, self.salt)
        number = math.ceil(self.texts / self.settings.texts_per_batch)
        return PoissonBatches.expected(size, self.proportions, s, number)

    @cached_property
    def method(self) -> PrivatePrediction:
        settings, texts = self.settings, self.settings.texts_per_batch
        if self.disjoint:
            texts = settings.texts_of_a_batch(self.private_tokens, self.batches.num_batches)
        records_per_unit = self.config.data.max_records_per_unit
        return PrivatePrediction(
            PrivateToken.of(settings, self.private_tokens, records_per_unit),
            settings.max_tokens,
            texts,
            self.template.template.stop,
            settings.longest_copy,
        )

    def audit_targets(self) -> Iterator[Target]:
        from dpray.methods.private_prediction.audit import runs_targets, targets

        yield from targets(self.method.mechanism)
        if isinstance(self.batches, PoissonBatches):
            yield from runs_targets(self.config.data, self.batches, self.method)

    # What is expected

    @property
    def batches_decoded(self) -> int:
        """Return the fewest batches that are decoded: all, or, for fewer records than batches, one
        for each record. A batch that gives no record takes one more."""
        most, batches = self.settings.max_records, self.batches.num_batches
        return batches if most is None or not self.disjoint else min(most, batches)

    @property
    def whole_texts(self) -> int:
        """Return the number of texts that the charge pays for in all batches, if each is as
        long as it may be."""
        texts = self.settings.texts_per_batch
        if self.disjoint:
            texts = self.private_tokens // self.settings.max_tokens
        return self.batches.num_batches * texts

    @property
    def expected_texts(self) -> int:
        """Return the number of texts that are decoded if each is as long as it may be. Disjoint
        batches usually give more: a short text leaves its tokens to the next one."""
        if not self.disjoint:
            return self.whole_texts
        a_batch = self.private_tokens // self.settings.max_tokens
        return self.batches_decoded * min(self.method.examples_per_batch, max(1, a_batch))

    @property
    def expected_records(self) -> int:
        """Return how many of these texts `method.max_records` lets be released."""
        return min(self.expected_texts, self.settings.max_records or self.expected_texts)

    @property
    def usual_rows(self) -> int:
        """Return the number of rows that a batch rarely exceeds if `data.public_size` is right, the
        public prompt's included. A batch with more is decoded all the same."""
        mean = float(self.settings.expected_batch_size)
        if self.disjoint:
            # A whole number of disjoint batches makes them larger than s if they are few.
            size, counts = self.config.data.public_size, self.batches.batches_per_label
            mean = max(mean, *(size * self.proportions[k] / n for k, n in counts.items() if n))
        return usual_rows(mean)

    # What every plan answers

    @property
    def text_of(self) -> TextOf | None:
        return self.template.text_of if self.template.record else None

    @property
    def token_limits(self) -> Sequence[TokenLimit]:
        return (TokenLimit("method.max_prompt_tokens", self.settings.max_prompt_tokens),)

    @property
    def engine_options(self) -> dict[str, Any]:
        # Public logits decide which tokens can be drawn, or whether from private ones at all.
        public_alone = self.settings.candidates != "all" or self.settings.public_gate is not None
        row_tokens = self.settings.max_prompt_tokens + self.settings.max_tokens
        if self.memory is not None:
            row_tokens = self.memory.row_tokens
        return {"public_alone": public_alone, "group": (self.usual_rows, row_tokens)}

    @property
    def fewest_records(self) -> int:
        rarest = min(share for share in self.proportions.values() if share > 0)
        return math.ceil(self.settings.expected_batch_size / rarest)

    def of_size(self, texts: int) -> dict[str, Any]:
        batches = self.settings.batches
        if self.disjoint:
            r = self.private_tokens
            return {"batches": batches, "max_records": texts, "private_tokens": r}
        a_batch = self.settings.texts_per_batch
        return {"batches": batches, "texts": a_batch * texts, "max_records": None}

    def stand_in(self) -> list[dict[str, Any]]:
        wanted = largest_remainder(self.expected_records, self.proportions)
        return [{"label": label, "text": ""} for label, n in wanted.items() for _ in range(n)]

    def given(self, handed: Handed) -> Self:
        return replace(self, template=replace(self.template, sequences=handed.terms))

    def with_salt(self, salt: str) -> Self:
        return replace(self, salt=salt)

    def how_far(self, published: int) -> str:
        done = self.published_batches(published)
        return f": {done} of {max(done, self.batches_decoded)} batches are published"

    def published_batches(self, published: int) -> int:
        """Return how many of the published units are batches: the measured labels are one more."""
        return max(published - (self.label_histogram is not None), 0)

    def method_summary(self) -> dict[str, Any]:
        mechanism, settings = self.method.mechanism, self.settings
        return {
            "method": {"name": settings.name, "template": settings.template}
            | {k: v for k, v in asdict(mechanism).items() if k not in RESTATED}
            | settings.model_dump(include=SUMMARISED)
            | {
                "max_records_per_batch": self.method.examples_per_batch,
                "model_dtype": self.config.engine.dtype,
            },
            "records": self.expected_records,
            "affordable_texts": dict(self.texts_affordable),
            "batches": self.batches.num_batches,
            "batches_decoded": self.batches_decoded,
            "batches_per_label": dict(self.batches.batches_per_label),
            "private_tokens": self.batches_decoded * mechanism.private_tokens,
            "llm_calls": self.expected_texts * (mechanism.batch_size + 1),
            "memory": self.memory and self.memory.summary(self.usual_rows),
            "warnings": warnings(self),
        }

    def lines(self) -> dict[str, str]:
        batches, r, decoded = self.batches.num_batches, self.private_tokens, self.batches_decoded
        s, most = self.settings.expected_batch_size, self.settings.max_records
        part = "" if decoded == batches else f"{decoded} of them decoded (more if some give none); "
        records = f"at most {self.expected_records}"
        if self.disjoint and self.expected_records != most:
            limit = "" if most is None else f"; at most {most}"
            records = (
                f"about {self.expected_records}, more if they are shorter than "
                f"{self.settings.max_tokens} tokens{limit}"
            )
        lines = {
            "batches": f"{batches}, {self.settings.batches}; {part}{s} records expected in each",
            "private tokens": f"{r} a batch, {decoded * r} in all",
            "records": records,
            "prompts decoded": f"about {self.expected_texts * (s + 1)}",
            "texts read": f"up to {self.settings.max_prompt_tokens} tokens of each "
            "(method.max_prompt_tokens)",
            "model": f"{self.config.engine.model}, in {self.config.engine.dtype}",
        }
        if self.texts_affordable:
            kinds = (f"{n} from {kind} batches" for kind, n in self.texts_affordable.items())
            lines["affordable texts"] = ", ".join(kinds)
        if self.memory is not None:
            lines["memory"] = self.memory.describe(self.usual_rows)
        return lines


def rare_labels(plan: PrivatePredictionPlan) -> dict[str, float]:
    """Return the labels whose Poisson batches are smaller than those of the others, with the number
    of records that they expect."""
    if not isinstance(plan.batches, PoissonBatches):
        return {}
    common, size = common_shares(plan.proportions), plan.config.data.public_size
    return {
        label: size * plan.proportions[label] * q
        for label, q in plan.batches.sampling_probabilities.items()
        if q and label not in common
    }


def warnings(plan: PrivatePredictionPlan) -> list[str]:
    settings, found = plan.settings, rounding_warnings(plan.config.engine.dtype)
    if plan.disjoint and plan.private_tokens < settings.max_tokens:
        found.append(
            "method.private_tokens is below method.max_tokens: a batch may end before its "
            "first text does; a larger batch_size or epsilon, or a shorter text, helps"
        )
    if not plan.disjoint and settings.public_gate and settings.private_tokens is None:
        found.append(
            "method.public_gate saves nothing while method.private_tokens is null: a Poisson "
            "batch is charged for its private_tokens, which are then all tokens of its texts"
        )
    if rare := rare_labels(plan):
        named = ", ".join(f"{k} ({n:.1f})" for k, n in rare.items())
        found.append(
            f"data.label_proportions: rare labels have smaller batches, so that they do not "
            f"raise the cost of all: {named} records expected, not "
            f"{settings.expected_batch_size}. Their texts lean on the public prompt; a run of "
            "their own gives them whole batches"
        )
    if plan.memory is not None:
        all_rows = plan.expected_texts * (settings.expected_batch_size + 1)
        found += plan.memory.warnings(plan.usual_rows, all_rows)
    return found


def make_plan(
    config: Config, settings: PrivatePredictionSettings, before: Before | None = None
) -> PrivatePredictionPlan:
    """Resolve everything that is null or auto. Raises InputError if the keys together cost more
    than `privacy.epsilon`, or do not fit the engine, or the model, if that is a folder here."""
    if config.engine.dtype == "auto":
        # The charged sensitivity is that of rows whose logits do not depend on the other rows of a
        # forward pass.
        engine = config.engine.model_copy(update={"dtype": "float32"})
        config = config.model_copy(update={"engine": engine})
    template = template_of(config, settings)
    if before is not None:
        template = template.showing(before.handed.terms)
    size, memory = affordable_batch_size(settings, config.engine, template, config.data.proportions)
    settings = settings.model_copy(update={"batch_size": size})
    if config.method.name == settings.name:
        # The number is what the run keeps: another machine may hold larger batches.
        config = config.model_copy(update={"method": settings})
    first = None if before is None else before.dp_event
    plan = with_batches(
        PrivatePredictionPlan(
            config, config.data.proportions, settings, 1, template, memory=memory, before=first
        )
    )
    if plan.cost.epsilon > config.privacy.epsilon:
        key = "method.private_tokens" if plan.disjoint else "method.texts"
        what = f"{plan.private_tokens} tokens a batch" if plan.disjoint else f"{plan.texts} texts"
        raise InputError(
            f"{key}: {what} cost eps {plan.cost.epsilon:.4f}, more than privacy.epsilon "
            f"{config.privacy.epsilon:g}; null takes as many as that pays for"
        )
    return plan


def template_of(config: Config, settings: PrivatePredictionSettings) -> PromptTemplate:
    """Load the template, with the public texts that it shows. Raises InputError for a wrong one."""
    shown = settings.few_shot_examples
    return load_template(
        settings.template, read_few_shot(settings.few_shot, shown, config.data.path)
    )


def with_batches(base: PrivatePredictionPlan) -> PrivatePredictionPlan:
    """Return the plan with the batches that its settings ask for; for `auto`, with those that
    afford more texts. Raises InputError if the epsilon, less what comes before, does not pay for
    one token, or one text."""
    makers, settings = {"poisson": _poisson, "disjoint": _disjoint}, base.settings
    if settings.batches != "auto":
        return makers[settings.batches](base)
    plans: dict[str, PrivatePredictionPlan] = {}
    affordable: dict[str, int] = {}
    refused: list[InputError] = []
    for kind, make in makers.items():
        chosen = settings.model_copy(update={"batches": kind})
        without_limit = chosen.model_copy(update={"max_records": None})
        try:
            plans[kind] = plan = make(replace(base, settings=chosen))
            if settings.max_records is not None and plan.whole_texts >= settings.max_records:
                plan = make(replace(base, settings=without_limit))
            affordable[kind] = plan.whole_texts
        except InputError as error:
            refused.append(error)
    if not affordable:
        raise refused[0]
    best = max(affordable, key=affordable.__getitem__)
    return replace(plans[best], texts_affordable=affordable)


def _disjoint(base: PrivatePredictionPlan) -> PrivatePredictionPlan:
    """Plan disjoint batches: r tokens as set, or the most that the epsilon pays for."""
    settings = base.settings
    if settings.for_poisson_only:
        key = "texts_per_batch" if settings.texts is None else "texts"
        raise InputError(f"method.{key}: for Poisson batches; disjoint ones have max_records")
    if settings.private_tokens is not None:
        return replace(base, private_tokens=settings.private_tokens)
    most = MOST_PRIVATE_TOKENS
    if settings.max_records is not None:
        most = settings.texts_of_a_batch(most, base.batches.num_batches) * settings.max_tokens
    plan = largest_affordable(lambda r: replace(base, private_tokens=r), most)
    if plan is None:
        one = replace(base, private_tokens=1)
        raise InputError(
            f"privacy.epsilon: {base.config.privacy.epsilon:g} does not pay for one private token, "
            f"which costs {one.cost.epsilon:.4f}; a larger method.batch_size or method.temperature "
            "is needed"
        )
    return plan


def _poisson(base: PrivatePredictionPlan) -> PrivatePredictionPlan:
    """Plan Poisson batches: as many texts as asked for, or the most that the epsilon pays for."""
    config, settings = base.config, base.settings
    if settings.sparse_vector is not None:
        raise InputError(
            "method.sparse_vector: is for disjoint batches, its answers cost too much in Poisson "
            "ones; method.public_gate costs nothing in either"
        )
    if config.data.label_proportions == "measured":
        raise InputError(
            "method.batches: poisson needs public data.label_proportions: what they cost is fixed "
            "before the data is opened; measured ones are for disjoint batches"
        )
    a_batch = settings.texts_per_batch
    tokens = settings.private_tokens or a_batch * settings.max_tokens
    if settings.texts is not None:
        return replace(base, private_tokens=tokens, texts=settings.texts)
    one = replace(base, private_tokens=tokens, texts=1)
    if settings.max_records is not None:
        wanted = replace(one, texts=settings.max_records)
        if wanted.cost.epsilon <= config.privacy.epsilon:
            return wanted
    plan = largest_affordable(lambda batches: replace(one, texts=batches * a_batch), MOST_TEXTS)
    if plan is None:
        raise InputError(
            f"privacy.epsilon: {config.privacy.epsilon:g} does not pay for one Poisson batch of "
            f"{tokens} private tokens of each label, which costs {one.cost.epsilon:.4f}; a larger "
            "data.public_size, method.batch_size or method.temperature, or fewer tokens "
            "(method.max_tokens), is needed"
        )
    return plan
