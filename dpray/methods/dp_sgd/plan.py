"""`make_plan` freezes the plan of a DP-SGD run from its configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import cast

import numpy as np

from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.event import Event
from dpray.accounting.events import PoissonSubsampledGaussian
from dpray.config.config import Config, EngineConfig
from dpray.engines.base import Engine, PlainPrompt, Sampling
from dpray.engines.model_path import absolute_model, is_at_hand
from dpray.engines.requests import Request
from dpray.engines.schema.forms import schema_for
from dpray.engines.schema.schema import Schema
from dpray.engines.text import TextCodec, codec_of, token_counter
from dpray.io.public_files import read_terms
from dpray.io.template_file import About
from dpray.mechanisms.attributes import Values, draw_values, margins
from dpray.mechanisms.monte_carlo import Target
from dpray.methods.dp_sgd.algorithm import DpSgd
from dpray.methods.dp_sgd.control_codes import (
    ControlCodes,
    control_codes,
    most_code_tokens,
)
from dpray.methods.dp_sgd.settings import DpSgdSettings
from dpray.methods.dp_sgd.training.step import DpSgdStep
from dpray.runs.forecast import Work
from dpray.runs.plan import (
    Choice,
    Plan,
    PublicCalls,
    Reads,
    Signal,
    TokenLimit,
    first_enough,
    label_histogram,
    resolved_noise_multiplier,
    within_epsilon,
)
from dpray.types import InputError
from dpray.workers.rows import Row

NO_NOISE = 1e-12
"""A run that is not private has this noise multiplier, lost in the rounding of every coordinate."""

MOST_STEPS = 2_000_000
"""The cost of more steps takes minutes to compute, and the steps themselves months."""

EPOCHS = (50.0, 20.0, 10.0, 5.0, 2.0, 1.0)

BATCHES = 16
"""The batches of an epoch. With larger batches there are fewer steps, and less noise."""

UNITS = 60.0
"""Enough clipped gradients in a batch, over the deviation of the noise in their sum. On two data
sets, runs above it taught more, on average, than runs below it (experiments/results_tables.md)."""


@dataclass(frozen=True)
class DpSgdPlan(Plan):
    """The plan of a run that trains in blocks of `checkpoint_steps`.

    An interrupted training resumes from its last checkpoint. The steps after it may have been made
    and seen, so they count, and so do those that are made in their place: T planned steps and R
    repeated ones are T + R steps of one mechanism. The first `method.repeats` of them are in the
    run's first charge; the others are charged when they are lost, before they are repeated.
    """

    settings: DpSgdSettings
    method: DpSgd
    checkpoint_steps: int
    codes: ControlCodes
    schema: Schema | None = None

    def loader(self, build: Callable[..., Engine], **options: object) -> Callable[[], object]:
        """Load the model as it is tuned. An engine that cannot load the tuned one costs nothing:
        the tuned model is kept, and its texts are free."""
        return partial(load_untuned, self.config.engine, self.settings, self.codes)

    @property
    def trials(self) -> Sequence[tuple[str, Callable[[Engine], None]]]:
        return ()

    def load_writer(self, build: Callable[..., Engine]) -> Engine:
        """Load the model as it is before the training."""
        return cast(Engine, super().loader(build)())

    def public_calls(self, labels: Sequence[str]) -> PublicCalls:
        """Ask the model for a text after each label's control code."""
        settings, column = self.settings, self.config.data.label
        drawn = draw_values(self.groups, len(labels), np.random.default_rng())
        sampling = Sampling(
            settings.max_length // 2,
            settings.temperature,
            settings.top_k,
            settings.top_p,
            schema=self.schema,
        )
        codes = [
            self.codes.code(values | ({column: label} if column else {}))
            for label, values in zip(labels, drawn, strict=True)
        ]
        return PublicCalls(
            [
                Request(f"preview-{number}", PlainPrompt(code), sampling)
                for number, code in enumerate(codes)
            ],
            attributes=drawn,
        )

    @property
    def about(self) -> About:
        """Return what labels mean: a control code says no more."""
        return replace(super().about, about="", language="")

    @property
    def method_event(self) -> Event:
        return self.method.dp_event

    def audit_targets(self) -> Iterator[Target]:
        from dpray.methods.dp_sgd.audit import training_target

        yield training_target(self.method)

    @property
    def reads(self) -> Reads:
        def tokens(codec: TextCodec, row: Row) -> int:
            return 1 + len(codec.ids(self.codes.code(row["columns"]))) + len(codec.ids(row["text"]))

        control = {name: tuple(shares) for name, shares in self.settings.shares.items()}
        most = self.settings.max_length
        limit = TokenLimit("method.max_length", most, lambda codec: 0, tokens)
        # Public combinations with the label may leave some of its values out.
        public = self.config.data.public_values
        columns = public | control | public
        is_measured = label_histogram(self.config) is not None
        return Reads(columns, token_limits=(limit,), checked_first=is_measured)

    def unpaid_repeats(self, lost: Sequence[int]) -> list[int]:
        """Return how many of the steps of each lost block the first charge does not pay for."""
        spare, unpaid = self.method.repeats, []
        for steps in lost:
            paid = min(spare, steps)
            spare -= paid
            unpaid.append(steps - paid)
        return unpaid

    def with_repeats(self, lost: Sequence[int]) -> DpSgdPlan:
        """Return the plan as it is charged once the steps of the lost blocks are repeated."""
        repeats = self.method.repeats + sum(self.unpaid_repeats(lost))
        return replace(self, method=replace(self.method, repeats=repeats))

    @property
    def noise_multiplier(self) -> float:
        return 0.0 if self.config.not_private else self.method.mechanism.noise_multiplier

    @property
    def shares(self) -> dict[str, Mapping[str, float]]:
        """Return the public share of each value of every control column."""
        values, measured = self.codes.values, margins(self.joint)
        return {
            column: self.proportions
            if column == self.config.data.label
            else measured.get(column, values[column])
            for column in self.codes.names
        }

    @property
    def groups(self) -> list[Mapping[Values, float]]:
        """Return the shares of combinations of values, for each group of columns that is drawn by
        itself: a column, those of `control_combinations`, or the label and the attributes."""
        joint = [each for each in (self.joint, self.settings.combinations) if each]
        drawn = {column for shares in joint for column, _ in next(iter(shares))}
        groups: list[Mapping[Values, float]] = [
            {((column, value),): share for value, share in shares.items()}
            for column, shares in self.shares.items()
            if column not in drawn
        ]
        return [*groups, *joint]

    @property
    def signal(self) -> Signal:
        """Return q N / sigma, the clipped gradients of a batch over the noise of their sum."""
        step = self.method.mechanism
        units = step.expected_batch_size / step.noise_multiplier
        return Signal(units, UNITS, "q N / sigma of a batch")

    @property
    def work(self) -> Work:
        settings, count = self.settings, token_counter(self.config.engine)
        code = count(PlainPrompt(self.codes.longest(len)))
        written = max(1, settings.max_length - code)
        trained = self.method.steps * settings.batch_size * settings.max_length
        return Work(settings.records * code, settings.records * written, trained)

    def method_summary(self) -> dict[str, object]:
        settings = self.settings
        return {
            "method": settings.model_dump()
            | {
                "learning_rate": settings.rate,
                "noise_multiplier": self.noise_multiplier,
                "sampling_probability": self.method.mechanism.sampling_probability,
                "steps": self.method.steps,
                "spare_steps": self.method.repeats,
                "checkpoint_steps": self.checkpoint_steps,
                "control_columns": dict(self.codes.names),
            },
            "records": settings.records,
            "llm_calls": settings.records,
            "most_completion_tokens": settings.records * settings.max_length,
            "expected_examples": round(settings.epochs * self.config.data.public_size),
            "noise_multiplier": self.noise_multiplier,
            "warnings": [
                "data.label is not in method.control_columns: the texts will be written without a "
                "label"
            ]
            if self.config.data.label not in {None, *self.codes.names}
            else [],
        }

    @property
    def cut(self) -> str:
        """Return the sentence about private texts that are too long; their number is private."""
        return (
            f"a private text is cut if it and its control code have more than "
            f"{self.settings.max_length} tokens (method.max_length)"
        )

    def lines(self) -> dict[str, str]:
        settings, method = self.settings, self.method
        return {
            "tuning": f"{settings.tuning} of {self.config.engine.model}, C {settings.clip_norm:g}",
            "steps": f"{method.steps:,} of expected {settings.batch_size:,} units "
            f"(q {method.mechanism.sampling_probability:.4g}), and {method.repeats:,} charged "
            f"beforehand that an interrupted run may repeat",
            "noise multiplier": f"{self.noise_multiplier:.4f}",
            "records": f"{settings.records:,}, at most {settings.max_length} tokens each",
            "long texts": f"{self.cut}; `dpray check` counts such texts, for the owner only",
        }


NOISE_MULTIPLIERS = (1e-2, 1e5)
"""The range of noise multipliers."""


def make_plan(config: Config, settings: DpSgdSettings) -> DpSgdPlan:
    """Resolve everything that is null. Raises InputError if the keys together cost more than
    `privacy.epsilon`, or do not fit the model."""
    plan = with_noise(config, settings)
    return within_epsilon(plan, plan.method.mechanism.noise_multiplier)


def with_noise(config: Config, settings: DpSgdSettings, noise: float | None = None) -> DpSgdPlan:
    """Return the plan with a noise multiplier that `settings` leave open, or the least one that
    `privacy.epsilon` allows."""
    codes = codes_of(config, settings)
    taken = 0
    if is_at_hand(config.engine.model):
        taken = check_lengths(config.engine, settings, codes)
    size = config.data.public_size
    if settings.batch_size > size:
        raise InputError(
            f"method.batch_size: {settings.batch_size} is more than data.public_size {size}"
        )
    # q = batch_size / size and steps = epochs / q, but for rounding.
    steps = math.ceil(settings.epochs * size / settings.batch_size - 1e-9)
    checkpoint_steps = min(steps, settings.checkpoint_steps or -(-steps // 100))
    repeats = settings.spare_steps
    if repeats is None:  # one block, if the noise can be made to pay for it
        repeats = checkpoint_steps if settings.noise_multiplier is None else 0
    if steps + repeats > MOST_STEPS:
        raise InputError(
            f"method.epochs: {steps + repeats:,} steps, of method.batch_size records each and "
            f"method.spare_steps included, are more than {MOST_STEPS:,}"
        )
    q = settings.batch_size / size

    def event(sigma: float) -> Event:
        return SelfComposed(PoissonSubsampledGaussian(q, sigma), steps + repeats)

    if noise is None:
        given = settings.noise_multiplier
        noise = resolved_noise_multiplier(config, given, event, NOISE_MULTIPLIERS)
    mechanism = DpSgdStep(
        sampling_probability=q,
        noise_multiplier=NO_NOISE if noise is None else noise,
        clip_norm=settings.clip_norm,
        expected_batch_size=float(settings.batch_size),
    )
    method = DpSgd(mechanism, steps, settings, repeats)
    proportions = config.data.proportions
    if joint := settings.shares.get(config.data.label or ""):
        proportions = dict.fromkeys(proportions, 0.0) | joint
    schema = schema_for(settings.schema, config.engine, settings.max_length - taken)
    return DpSgdPlan(config, proportions, settings, method, checkpoint_steps, codes, schema)


def codes_of(config: Config, settings: DpSgdSettings) -> ControlCodes:
    """Return the control codes, with the public terms that they may name."""
    terms = read_terms(settings.terms, config.data.label_names, config.data.path)
    return control_codes(config.data, settings).with_sequences(terms, config.data.label)


def with_public_files(plan: DpSgdPlan) -> DpSgdPlan:
    """Return the plan with the public files that its settings name, read again."""
    return replace(plan, codes=codes_of(plan.config, plan.settings))


def load_untuned(engine: EngineConfig, settings: DpSgdSettings, codes: ControlCodes) -> None:
    """Look at all weights of the model that is tuned, check the rules for its norms, and that the
    codes fit its context.

    The rules are checked on a few layers, so that no process holds all weights in float32: under
    ZeRO 3 no rank does. Every rank checks them on the whole model before its first step.
    """
    # Imported late: a plan that is only looked at needs no torch.
    from dpray.methods.dp_sgd.training.model import check_norms, load_loss

    check_lengths(engine, settings, codes)
    model = absolute_model(engine.model)
    with suppress(Exception):  # the whole model decides, and says why
        few = load_loss(model, settings, few_layers=True)
        check_norms(few, few)
        return
    loss = load_loss(model, settings)
    check_norms(loss, loss)


def check_lengths(engine: EngineConfig, settings: DpSgdSettings, codes: ControlCodes) -> int:
    """Return the most tokens that may come before a text.

    Raises InputError if `method.max_length` is more than the context of the model that is tuned, or
    leaves no room for a text after its control code, or for the longest term in it."""
    codec = codec_of(engine.model, engine.max_model_len)

    def longest(terms: Sequence[str] = ()) -> int:
        return len(codec.ids(codes.longest(lambda code: len(codec.ids(code)), terms)))

    length, context = settings.max_length, codec.context_length
    if length > context:
        raise InputError(
            f"method.max_length: {length} is more than the context of the model, {context} tokens"
        )
    if (needs := 1 + longest()) >= length:
        raise InputError(
            f"method.max_length: {length} leaves nothing for a text: a control code has {needs} "
            "tokens"
        )
    most = most_code_tokens(length)
    for term in {terms[0] for terms in chain.from_iterable(codes.sequences.values())}:
        if (needs := longest([term])) > most:
            raise InputError(
                f"method.max_length: {length} has room for {most} tokens of a control code, and "
                f"one with the longest label and term has {needs}"
            )
    return max(needs, most if codes.sequences else 0)


def choose(config: Config, settings: DpSgdSettings, records: int) -> Choice:
    """Take the most passes whose batches stand above their noise, or else one pass. Keys
    that are set stay as they are."""
    given = settings.model_fields_set
    batch_size = max(1, config.data.public_size // BATCHES)
    if "batch_size" in given:
        batch_size = settings.batch_size

    def plan_of(epochs: float, noise: float | None) -> DpSgdPlan:
        tried = settings.model_copy(update={"epochs": epochs, "batch_size": batch_size})
        with_passes = config.model_copy(update={"method": tried})
        if noise is None:
            return make_plan(with_passes, tried)
        return with_noise(with_passes, tried, noise)

    candidates = (settings.epochs,) if "epochs" in given else EPOCHS
    bracket = NOISE_MULTIPLIERS if settings.noise_multiplier is None else None
    best = first_enough(plan_of, candidates, bracket)
    why = "the most whose batches stand above the noise"
    if "epochs" in given:
        why = "as they are set"
    elif not best.signal.is_enough:
        why = "the least noise that is tried"
    what = f"{best.settings.epochs:g} passes in batches of {batch_size}"
    return Choice(best, best.signal, (f"{what}: {why}",))
