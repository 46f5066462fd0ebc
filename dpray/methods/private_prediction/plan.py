"""The plan of private prediction, and `make_plan`, which resolves a configuration to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import takewhile

import numpy as np

from dpray.accounting.accountant import calibrate
from dpray.accounting.event import Event
from dpray.config.config import Config
from dpray.engines.base import Engine, Sampling
from dpray.engines.kv_cache import gpu_memory
from dpray.engines.rates import measure_rates
from dpray.engines.requests import Request
from dpray.engines.row_variation import refuse_dependence, rounding_warnings, row_variation_once
from dpray.engines.schema.forms import forced_tokens, most_free_tokens
from dpray.engines.schema.schema import Form, read_schema
from dpray.engines.text import TextCodec, token_counter
from dpray.engines.vllm.model import context_of
from dpray.mechanisms.batches import HashPartition, PoissonBatches
from dpray.mechanisms.labels import common_shares
from dpray.mechanisms.monte_carlo import Target
from dpray.methods.private_prediction.algorithm import PrivatePrediction
from dpray.methods.private_prediction.mechanism import PrivateToken
from dpray.methods.private_prediction.memory import (
    BatchMemory,
    batch_size_and_memory,
    codec_at_hand,
    prompt_room,
    usual_rows,
)
from dpray.methods.private_prediction.prompts import (
    PromptTemplate,
    after_sections,
    check_shown,
    shown_examples,
    template_of,
    with_longest,
)
from dpray.methods.private_prediction.sections import sections_of
from dpray.methods.private_prediction.settings import PrivatePredictionSettings
from dpray.runs.forecast import Work
from dpray.runs.plan import Plan, PublicCalls, Reads, TokenLimit, is_within_epsilon
from dpray.types import InputError
from dpray.workers.rows import Row

RESTATED = {"threshold", "noise", "sure_probability"}
"""These fields of a mechanism are in a plan's summary as the sections they come from."""

SUMMARISED = {
    "batches", "public_gate", "sparse_vector", "max_tokens", "max_prompt_tokens", "longest_copy",
    "schema", "sections", "end_tokens",
}  # fmt: skip
"""These keys are in a plan's summary next to the mechanism's."""

MOST = 10_000_000
"""The most private tokens of a batch, and the most texts, that are looked for."""

LARGER = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
SHORTER = (0.75, 0.5, 0.25, 0.125)
"""The sizes of batches and the lengths of texts that are tried, as parts of those in a plan."""


@dataclass(frozen=True)
class PrivatePredictionPlan(Plan):
    """A run's charge, its expected output, and the targets of its audit.

    `settings.batches` is never "auto", and `config.engine.dtype` is what the model computes in.
    `private_tokens` is a batch's, and `texts` the number of texts from Poisson batches, None with
    disjoint ones. `form` is that of `settings.schema`; it leaves no choice about
    `forced_tokens` tokens of its shortest text (0 if the model's files are not here), and about at
    most `free_tokens` of any text (`most_free_tokens`; None if it is not known). `salt` is the
    partition's, "" in a plan that is not run. `texts_affordable` is the number of texts that the
    epsilon pays for with each kind of batches that was considered.
    `memory` is what a batch takes on this machine, None if the model's files are not here.
    """

    settings: PrivatePredictionSettings
    private_tokens: int
    template: PromptTemplate
    form: Form | None = None
    forced_tokens: int = 0
    free_tokens: int | None = None
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
        return PoissonBatches.expected(size, self.proportions, s, self.texts)

    @cached_property
    def method(self) -> PrivatePrediction:
        settings, texts = self.settings, 1
        if self.disjoint:
            texts = settings.texts_of_a_batch(self.private_tokens, self.batches.num_batches)
        records_per_unit = self.config.data.max_records_per_unit
        return PrivatePrediction(
            PrivateToken.of(settings, self.private_tokens, records_per_unit),
            settings.max_tokens,
            texts,
            self.stop,
            settings.longest_copy,
            self.form,
            settings.sections,
            settings.end_tokens,
        )

    @property
    def stop(self) -> tuple[str, ...]:
        """Return the strings that end a text."""
        return (*self.settings.stop, *self.template.template.stop)

    @property
    def open_keys(self) -> dict[str, object]:
        """Return `batches: auto` if that is what the configuration leaves open."""
        given = self.config.method.each[-1]
        is_auto = isinstance(given, PrivatePredictionSettings) and given.batches == "auto"
        return {"batches": "auto"} if is_auto else {}

    def texts_of(self, max_tokens: int) -> int:
        settings = self.settings.model_copy(update=self.open_keys | {"max_tokens": max_tokens})
        try:
            plan = make_plan(self.config, settings)
            return min(plan.expected_records, plan.whole_texts)
        except InputError:  # epsilon does not pay for one, or the context has no room for it
            return 0

    def audit_targets(self) -> Iterator[Target]:
        from dpray.methods.private_prediction.audit import runs_targets, targets

        yield from targets(self.method.mechanism, self.form is not None)
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
    def private_tokens_of_a_text(self) -> int:
        """Return the most private tokens of a text: those that its schema leaves a choice about,
        or those of all its sections."""
        return self.free_tokens or self.settings.document_tokens

    @property
    def may_give_none(self) -> bool:
        """Return whether a batch may have drawn its private tokens before its first text is whole.
        It gives no text then."""
        return self.private_tokens < self.private_tokens_of_a_text

    @cached_property
    def shortage(self) -> str:
        """Return why there may be fewer texts than were asked for, with the one key to turn; "" if
        there are as many."""
        settings, r = self.settings, self.private_tokens
        if not self.disjoint and self.may_give_none and _all_cost(settings):
            return (
                f"method.private_tokens: a text that has not ended after {r} tokens is dropped, "
                f"and method.max_tokens is {settings.max_tokens}; null pays for whole texts"
            )
        if self.whole_texts >= (wanted := settings.max_records or 1):
            return ""
        asked = f"max_records: of {wanted} texts" if settings.max_records else "max_tokens:"
        why = f"epsilon pays for {self.whole_texts} of {settings.document_tokens} tokens"
        if self.disjoint and r < settings.document_tokens:
            why += f", and a batch may end before its first text, after {r}"
        return f"method.{asked} {why}; {one_key(self, wanted)}"

    def warnings_before_charge(self) -> list[str]:
        settings, r = self.settings, self.private_tokens
        # One token of a text, and the ends of all sections that max_tokens does not end.
        least = settings.sections + (settings.max_tokens > 1)
        if _all_cost(settings) and self.form is None and r < least:
            if settings.private_tokens is None:
                tokens = f"{r} private token{'s' * (r > 1)}"
                pays = f"privacy.epsilon: {self.config.privacy.epsilon:g} pays for {tokens}"
                way_on = one_key(self, settings.max_records or 1)
            else:
                pays, way_on = f"method.private_tokens: {r}", "raise it, or set it to null"
            raise InputError(
                f"{pays} a batch, but the shortest text takes {least} with its end: no text would "
                f"be made; {way_on}"
            )
        return [self.shortage] if self.may_give_none and self.shortage else []

    @property
    def whole_texts(self) -> int:
        """Return the number of texts that the charge pays for in all batches, if each is as
        long as it may be."""
        texts = self.private_tokens // self.private_tokens_of_a_text if self.disjoint else 1
        return self.batches.num_batches * texts

    @property
    def expected_texts(self) -> int:
        """Return the number of texts that are decoded if each is as long as it may be. Disjoint
        batches usually give more: a short text leaves its tokens to the next one."""
        if not self.disjoint:
            return self.whole_texts
        a_batch = self.private_tokens // self.private_tokens_of_a_text
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

    @property
    def work(self) -> Work:
        """Return the work of batches of the expected size. A batch's prompts are prefilled once for
        all its texts. vLLM does not compute again what the prompts of a batch begin with in common,
        and neither engine reuses a record's prompt in another batch here: vLLM may, from its cache.
        """
        settings, engine = self.settings, self.config.engine
        s, drawn = settings.expected_batch_size, settings.document_tokens
        in_common, shared = list[int](), 0
        count, labels, templates = token_counter(engine), self._decoded_labels, self.template
        shown = {label: templates.examples(label, "") for label in labels}
        public = max(count(templates.public_prompt(label, shown[label])) for label in labels)
        if self.memory is None:
            row = public + settings.max_prompt_tokens
        else:
            row = self.memory.row_tokens - drawn
        codec = codec_at_hand(engine)
        if engine.kind == "vllm" and codec is not None:
            block = 32 if gpu_memory(engine) is None else 16
            for x in labels:
                one, other = (
                    codec.encode(templates.private_prompt(text, x, shown[x])) for text in "az"
                )
                same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
                in_common.append(len([*same]))
            shared = min(in_common) - min(in_common) % block
        prefills = self.batches_decoded
        if settings.sections > 1:  # each has prompts of its own, with what is written
            prefills = self.expected_texts * settings.sections
            row += (drawn - settings.max_tokens) // 2
        prefill = prefills * (s * (row - shared) + shared + public)
        if self.memory is not None and (held := self.memory.rows_at_once) < s + 1:
            # The others are computed again for every token.
            prefill += self.expected_texts * drawn * (s + 1 - held) * row
        return Work(prefill, self.expected_texts * (s + 1) * drawn)

    def public_calls(self, labels: Sequence[str]) -> PublicCalls:
        settings, engine = self.settings, self.config.engine
        codec, rng = codec_at_hand(engine), np.random.default_rng()
        drawn = {str(n): self.drawn_values(x, 1, rng)[0] for n, x in enumerate(labels)}
        templates = replace(self.template, drawn=drawn)
        sampling = Sampling(
            settings.max_tokens,
            settings.temperature,
            0 if settings.candidates == "all" else settings.k,
            stop=self.stop,
            schema=None if self.form is None else self.form.schema,
        )

        def request(number: int, written: Sequence[tuple[str, bool]]) -> Request:
            label, section = labels[number], len(written)
            template = templates.of_batch(label, str(number))
            before = template.joined(written)
            if codec is None:
                shown = template.by_section(template.examples(label, str(number)))[section]
                template = template.after(before)
            else:
                room = context_of(engine, codec) - settings.document_tokens
                shown = shown_examples(codec, template, label, str(number), room)[section]
                most = settings.document_tokens - settings.max_tokens
                template = after_sections(codec, template, label, shown, before, most)
            prompt = template.public_prompt(label, shown)
            return Request(f"preview-{number}", prompt, sampling)

        requests = [request(number, ()) for number in range(len(labels))]

        def ending(number: int, text: str) -> Request | None:
            asked, free = requests[number], self.method.mechanism.ending.public_temperature
            prompt = replace(asked.prompt, prefix=asked.prompt.prefix + text)
            most = settings.end_tokens
            if codec is not None:
                most = min(most, context_of(engine, codec) - len(codec.encode(prompt)))
            sampling_free = replace(sampling, max_tokens=most, temperature=free, top_k=0)
            return Request(f"{asked.request_id}-end", prompt, sampling_free) if most > 0 else None

        return PublicCalls(
            requests,
            self.template.template.shows("user", "about"),
            settings.expected_batch_size,
            partial(self.template.released, form=self.form),
            settings.sections,
            request,
            self.template.joined,
            [*drawn.values()],
            ending if settings.end_tokens else None,
        )

    # What every plan answers

    @property
    def reads(self) -> Reads:
        key, most = "method.max_prompt_tokens", self.settings.max_prompt_tokens
        K, may_have_more = self.settings.sections, self.form is None and self.template.shows_before

        def longest(codec: TextCodec, row: Row) -> int:
            return max(len(codec.ids(each)) for each in sections_of(row["text"], K))

        limit = TokenLimit(key, most, self._rest, longest, K == 1 and may_have_more)
        return Reads(self.config.data.public_values, (limit,))

    def _rest(self, codec: TextCodec) -> int:
        """Return the tokens of a row without its private text: of its prompt, and those drawn."""
        context, drawn = context_of(self.config.engine, codec), self.settings.document_tokens
        return context - prompt_room(self.template, self.proportions, codec, context, drawn)[1]

    @property
    def text_tokens(self) -> tuple[int, str]:
        """Return the most tokens that are read of a private text, and what sets them."""
        most = self.settings.max_prompt_tokens
        if self.memory is not None and self.memory.text_room < most:
            return self.memory.text_room, "what the context leaves, engine.max_model_len"
        return most, "method.max_prompt_tokens"

    @property
    def public_decides(self) -> bool:
        """Return whether public logits decide which tokens can be drawn, or whether from private
        ones at all."""
        settings = self.settings
        is_gated = settings.public_gate is not None or settings.end_tokens > 0
        return settings.candidates != "all" or is_gated

    def loader(self, build: Callable[..., Engine], **options: object) -> Callable[[], Engine]:
        row_tokens = self.settings.max_prompt_tokens + self.settings.document_tokens
        if self.memory is not None:
            row_tokens = self.memory.row_tokens
        group = (self.usual_rows, row_tokens)
        return super().loader(build, public_alone=self.public_decides, group=group)

    def try_engine(self, engine: Engine) -> None:
        # Where the plan is made, the model's files may not be.
        self._longest_frame(engine)
        templates = with_longest(self.template, self.config.data.attribute_names, engine)
        if self.form is not None:
            forced_tokens(self.form, self.settings.max_tokens)
        for label in self._decoded_labels:
            template = templates.of_batch(label, "")
            room = engine.context_length - self.settings.document_tokens
            check_shown(engine, template, label, room)
        self.row_variation(engine)

    @property
    def trials(self) -> Sequence[tuple[str, Callable[[Engine], None]]]:
        return [*super().trials, ("measuring the speed", self.measure_speed)]

    def measure_speed(self, engine: Engine) -> None:
        measure_rates(engine, self.settings.expected_batch_size)

    def row_variation(self, engine: Engine) -> float:
        """Return how far an engine's rows move each other, measured with public prompts
        (`dpray.engines.row_variation`). Raises InputError if that is too far for this mechanism."""
        mechanism, shares = self.method.mechanism, engine.shares_public_pass
        drawn, most = self.settings.document_tokens, self.settings.max_prompt_tokens
        longest = min(engine.context_length, self._longest_frame(engine) + most + drawn)
        moved = row_variation_once(engine, mechanism.batch_size, longest)
        share = mechanism.share_of_rounding(moved, shares)
        dtype, exact = self.config.engine.dtype, self.public_decides and shares
        refuse_dependence(moved, share, dtype, exact)
        return moved

    def _longest_frame(self, engine: Engine) -> int:
        context, drawn = engine.context_length, self.settings.document_tokens
        template = with_longest(self.template, self.config.data.attribute_names, engine)
        return prompt_room(template, self._decoded_labels, engine, context, drawn)[0]

    @property
    def _decoded_labels(self) -> list[str]:
        return [label for label, batches in self.batches.batches_per_label.items() if batches]

    def method_summary(self) -> dict[str, object]:
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
            "llm_calls": self.expected_texts * settings.sections * (mechanism.batch_size + 1),
            "memory": self.memory and self.memory.summary(self.usual_rows),
            "warnings": warnings(self),
        }

    def lines(self) -> dict[str, str]:
        batches, r, decoded = self.batches.num_batches, self.private_tokens, self.batches_decoded
        s, most = self.settings.expected_batch_size, self.settings.max_records
        K = self.settings.sections
        part = "" if decoded == batches else f"{decoded} of them decoded (more if some give none); "
        records = f"at most {self.expected_records}"
        if self.disjoint and self.expected_records != most:
            limit = "" if most is None else f"; at most {most}"
            records = (
                f"about {self.expected_records}, more if they are shorter than "
                f"{self.settings.document_tokens} tokens{limit}"
            )
        lines = {
            "batches": f"{batches}, {self.settings.batches}; {part}{s} records expected in each",
            "private tokens": f"{r} a batch, {decoded * r} in all",
            "records": records,
            "prompts decoded": f"about {self.expected_texts * K * (s + 1)}",
            "texts read": "up to {} tokens of each ({})".format(*self.text_tokens),
            "model": f"{self.config.engine.model}, in {self.config.engine.dtype}",
        }
        if K > 1:
            lines["sections"] = f"{K} of a text, of up to {self.settings.max_tokens} tokens each"
        if self.form is not None:
            least = f"; it forces at least {self.forced_tokens} tokens of a text, which are free"
            lines["schema"] = self.form.schema.title + (least if self.forced_tokens else "")
        if self.texts_affordable:
            kinds = (f"{n} from {kind} batches" for kind, n in self.texts_affordable.items())
            lines["affordable texts"] = ", ".join(kinds)
        if self.memory is not None:
            lines["memory"] = self.memory.describe(self.usual_rows)
        return lines


def _all_cost(settings: PrivatePredictionSettings) -> bool:
    """Return whether every token that a schema does not force is a private one."""
    return settings.sparse_vector is None and settings.public_gate is None


def warnings(plan: PrivatePredictionPlan) -> list[str]:
    settings, found = plan.settings, rounding_warnings(plan.config.engine.dtype)
    s = settings.expected_batch_size
    if not plan.disjoint and settings.public_gate and settings.private_tokens is None:
        found.append(
            "method.public_gate saves nothing while method.private_tokens is null: a Poisson "
            "batch is charged for its private_tokens, which are then all tokens of its text"
        )
    if isinstance(plan.batches, PoissonBatches):
        common, size = common_shares(plan.proportions), plan.config.data.public_size
        rare = [
            f"{label} ({size * plan.proportions[label] * q:.1f})"
            for label, q in plan.batches.sampling_probabilities.items()
            if q and label not in common
        ]
        if rare:
            found.append(
                f"data.label_proportions: rare labels have smaller batches, so that they do not "
                f"raise the cost of all: {', '.join(rare)} records expected, not {s}. Their texts "
                "lean on the public prompt; a run of their own gives them whole batches"
            )
    if plan.memory is not None:
        found += plan.memory.warnings(plan.usual_rows)
    if plan.shortage:
        found.append(plan.shortage)
    most = settings.max_records
    labels = sum(share > 0 for share in plan.proportions.values())
    if most is not None and most < labels:
        same = f"; {labels} cost the same" if costs_the_same(plan, labels) else ""
        found.append(
            f"method.max_records: {most} for {labels} labels: some of them get no text{same}"
        )
    return found


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


def make_plan(config: Config, settings: PrivatePredictionSettings) -> PrivatePredictionPlan:
    """Resolve everything that is null or auto. Raises InputError if the keys together cost more
    than `privacy.epsilon`, or do not fit the engine, or the model, if that is a folder here."""
    if config.engine.dtype == "auto":
        # The charged sensitivity is that of rows whose logits do not depend on the other rows of a
        # forward pass.
        engine = config.engine.model_copy(update={"dtype": "float32"})
        config = config.model_copy(update={"engine": engine})
    template = template_of(config, settings)
    labels, codec = config.data.proportions, codec_at_hand(config.engine)
    if codec is not None:
        template = with_longest(template, config.data.attribute_names, codec)
    size, memory = batch_size_and_memory(settings, config.engine, template, labels, codec)
    form, forced, free = None, 0, None
    if settings.schema is not None:
        # It begins where the template's prompts end.
        form = Form(read_schema(settings.schema), config.engine.model, template.before())
        if codec is not None:
            forced = forced_tokens(form, settings.max_tokens)
            free = most_free_tokens(form, settings.max_tokens)
    settings = settings.model_copy(update={"batch_size": size})
    if config.method.name == settings.name:
        # The number is what the run keeps: another machine may hold larger batches.
        config = config.model_copy(update={"method": settings})
    plan = with_batches(
        PrivatePredictionPlan(
            config, labels, settings, 1, template, form, forced, free, memory=memory
        )
    )
    if plan.cost.epsilon > config.privacy.epsilon:
        key = "method.private_tokens" if plan.disjoint else "method.texts"
        what = f"{plan.private_tokens} tokens a batch" if plan.disjoint else f"{plan.texts} texts"
        raise InputError(
            f"{key}: {what} cost eps {plan.cost.epsilon:.4f}, more than privacy.epsilon "
            f"{config.privacy.epsilon:g}; null takes as many as that pays for"
        )
    if _all_cost(settings) and plan.private_tokens < settings.sections:
        raise InputError(
            f"method.sections: each of {settings.sections} takes a private token at least, and a "
            f"batch has {plan.private_tokens} (method.private_tokens, or what epsilon pays for); "
            "take fewer sections, a larger batch_size or a larger epsilon"
        )
    return plan


def with_public_files(plan: PrivatePredictionPlan) -> PrivatePredictionPlan:
    """Return the plan with the public files that its settings name, read again."""
    return replace(plan, template=template_of(plan.config, plan.settings))
