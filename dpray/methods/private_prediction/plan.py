"""`make_plan` makes the frozen plan of private prediction from a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from dpray.accounting.accountant import cost
from dpray.accounting.calibration import calibrate
from dpray.accounting.event import Event
from dpray.config.config import Config
from dpray.config.sections import EngineConfig
from dpray.engines.kv_cache import gpu_memory
from dpray.engines.model_path import is_at_hand, resolve_model
from dpray.engines.text import TextCodec
from dpray.engines.vllm_model import DEFAULT_CONTEXT
from dpray.io.few_shot import read_few_shot
from dpray.methods.private_prediction.batch_memory import BatchMemory, batch_memory
from dpray.methods.private_prediction.decoder import shown_examples
from dpray.methods.private_prediction.prompts import PromptTemplate, load_template
from dpray.methods.private_prediction.resolved import (
    PrivatePredictionPlan,
    private_token,
    texts_of_a_batch,
)
from dpray.methods.private_prediction.settings import PrivatePredictionSettings
from dpray.runs.plan import Before, with_labels
from dpray.types import InputError

MOST_PRIVATE_TOKENS = MOST_TEXTS = 10_000_000


def make_plan(
    config: Config, settings: PrivatePredictionSettings, before: Before | None = None
) -> PrivatePredictionPlan:
    """Resolve everything that is null or auto. Raises InputError where the keys together cost more
    than `privacy.epsilon`, or do not fit the engine, or the model, where that is a folder here."""
    config = _with_dtype(config)
    template = template_of(config, settings)
    first = None
    if before is not None:
        first, template = before.dp_event, template.showing(before.handed.terms)
    settings, memory = resolve_memory(config, settings, template)
    if config.method.name == settings.name:
        # The number is what the run keeps: another machine may hold larger batches.
        config = config.model_copy(update={"method": settings})
    plan = replace(choose_batches(config, settings, template, first), memory=memory)
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


def choose_batches(
    config: Config,
    settings: PrivatePredictionSettings,
    template: PromptTemplate,
    before: Event | None = None,
) -> PrivatePredictionPlan:
    """Return the plan with the batches that are asked for; for `auto`, with those that afford more
    texts. Raises InputError where the epsilon, less what comes `before`, does not pay for one
    token, or one text."""
    if settings.batches == "poisson":
        return _poisson(config, settings, template, before)
    if settings.batches == "disjoint":
        return _disjoint(config, settings, template, before)
    plans: dict[str, PrivatePredictionPlan] = {}
    affordable: dict[str, int] = {}
    refused: list[InputError] = []
    for kind, make in (("poisson", _poisson), ("disjoint", _disjoint)):
        chosen = settings.model_copy(update={"batches": kind})
        without_limit = chosen.model_copy(update={"max_records": None})
        try:
            plans[kind] = plan = make(config, chosen, template, before)
            if settings.max_records is not None and plan.whole_texts >= settings.max_records:
                plan = make(config, without_limit, template, before)
            affordable[kind] = plan.whole_texts
        except InputError as error:
            refused.append(error)
    if not affordable:
        raise refused[0]
    best = max(affordable, key=affordable.__getitem__)
    return replace(plans[best], texts_affordable=affordable)


def affords(
    config: Config,
    settings: PrivatePredictionSettings,
    template: PromptTemplate,
    texts: int,
    before: Event | None = None,
) -> bool:
    """Return whether the epsilon, less what comes `before`, pays for so many texts, in one kind of
    batches at least. That is one evaluation of the cost for Poisson ones, where the largest
    affordable number takes dozens.
    """
    wanted: dict[str, dict[str, Any]] = {
        "poisson": {"texts": texts, "max_records": None},
        "disjoint": {"texts": None, "max_records": texts},
    }
    for kind, make in (("disjoint", _disjoint), ("poisson", _poisson)):
        if settings.batches in (kind, "auto"):
            asked = settings.model_copy(update=wanted[kind] | {"batches": kind})
            with suppress(InputError):
                plan = make(config, asked, template, before)
                if plan.whole_texts >= texts and plan.cost.epsilon <= config.privacy.epsilon:
                    return True
    return False


def _disjoint(
    config: Config,
    settings: PrivatePredictionSettings,
    template: PromptTemplate,
    before: Event | None,
) -> PrivatePredictionPlan:
    if settings.for_poisson_only:
        key = "texts_per_batch" if settings.texts is None else "texts"
        raise InputError(f"method.{key}: for Poisson batches; disjoint ones have max_records")
    proportions = config.data.proportions
    plan = PrivatePredictionPlan(config, proportions, settings, 1, template, before=before)
    r = settings.private_tokens
    if r is None:
        most = MOST_PRIVATE_TOKENS
        if settings.max_records is not None:
            most = texts_of_a_batch(settings, most, plan.batches.num_batches) * settings.max_tokens
        r = _affordable_tokens(config, settings, most, before)
    return replace(plan, private_tokens=r)


def _poisson(
    config: Config,
    settings: PrivatePredictionSettings,
    template: PromptTemplate,
    before: Event | None,
) -> PrivatePredictionPlan:
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
    one = PrivatePredictionPlan(
        config, config.data.proportions, settings, tokens, template, 1, before=before
    )
    if settings.texts is not None:
        return replace(one, texts=settings.texts)
    if settings.max_records is not None:
        as_many = replace(one, texts=settings.max_records)
        if as_many.cost.epsilon <= config.privacy.epsilon:
            return as_many
    return replace(one, texts=a_batch * _affordable_batches(one))


def _affordable_batches(one: PrivatePredictionPlan) -> int:
    """Return the largest number of Poisson batches that the epsilon pays for."""
    a_batch, privacy = one.settings.texts_per_batch, one.config.privacy

    def event(batches: float) -> Event:
        return replace(one, texts=int(batches) * a_batch).dp_event

    try:
        return int(
            calibrate(
                event,
                privacy.epsilon,
                privacy.delta,
                bracket=(1, MOST_TEXTS),
                increasing=True,
                integer=True,
            )
        )
    except ValueError:
        raise InputError(
            f"privacy.epsilon: {privacy.epsilon:g} does not pay for one Poisson batch of "
            f"{one.private_tokens} private tokens of each label, which costs "
            f"{one.cost.epsilon:.4f}; a larger data.public_size, method.batch_size or "
            "method.temperature, or fewer tokens (method.max_tokens), is needed"
        ) from None


def _with_dtype(config: Config) -> Config:
    """Return the configuration with float32 unless another dtype is asked for: the charged
    sensitivity is that of rows whose logits do not depend on the other rows of a forward pass."""
    if config.engine.dtype != "auto":
        return config
    engine = config.engine.model_copy(update={"dtype": "float32"})
    return config.model_copy(update={"engine": engine})


AUTO_SIZES = (127, 63, 31, 15, 7, 3, 1)
"""`batch_size: auto` takes the first of these that fits: the paper's least, and smaller ones."""

LARGEST_ON_CPU = 31
"""`batch_size: auto` is at most this on a CPU, where a text takes as long as its batch is large."""


def resolve_memory(
    config: Config, settings: PrivatePredictionSettings, template: PromptTemplate
) -> tuple[PrivatePredictionSettings, BatchMemory | None]:
    """Return the settings with a number for `batch_size`, and the memory of batches on the machine
    that makes the plan; the largest size, and None, if the model's files are not here. Raises
    InputError if a prompt leaves no room in the model's context for a text."""
    sizes = [settings.batch_size] if settings.batch_size != "auto" else auto_sizes(config.engine)
    sized = settings.model_copy(update={"batch_size": sizes[0]})
    engine = config.engine
    if not is_at_hand(engine.model):
        return sized, None
    codec = TextCodec(resolve_model(engine.model), engine.max_model_len)
    frame = longest_frame(config, settings, template, codec)
    row_tokens = frame + settings.max_prompt_tokens + settings.max_tokens
    memory_of = partial(
        batch_memory, engine, codec.model_config, min(context_of(engine, codec), row_tokens)
    )
    for s in sizes:
        sized = settings.model_copy(update={"batch_size": s})
        rows = PrivatePredictionPlan(
            config, config.data.proportions, sized, 1, template, texts=1
        ).usual_rows
        memory = memory_of(rows)
        if memory.parts(rows) == 1:
            break
    return sized, memory


def auto_sizes(engine: EngineConfig) -> list[int]:
    most = LARGEST_ON_CPU if gpu_memory(engine) is None else max(AUTO_SIZES)
    return [s for s in AUTO_SIZES if s <= most]


def context_of(engine: EngineConfig, codec: TextCodec) -> int:
    if engine.kind == "vllm" and engine.max_model_len is None:
        return min(codec.context_length, DEFAULT_CONTEXT)
    return codec.context_length


def longest_frame(
    config: Config,
    settings: PrivatePredictionSettings,
    template: PromptTemplate,
    codec: TextCodec,
) -> int:
    """Return the most tokens of a prompt without its private text, with the examples that it may
    show. Raises InputError where a prompt, even without examples, leaves no room in the model's
    context for a text of `method.max_tokens`."""
    context = context_of(config.engine, codec)

    def longest(label: str, examples: Sequence[str]) -> int:
        shown = template.of_batch(label, "")
        prompts = (
            shown.private_prompt("", label, examples), shown.public_prompt(label, examples)
        )  # fmt: skip
        return max(len(codec.encode(prompt)) for prompt in prompts)

    labels = config.data.proportions
    least = max(longest(label, ()) for label in labels)
    if least + settings.max_tokens > context:
        raise InputError(
            f"method.max_tokens: {settings.max_tokens} and the {least} tokens of "
            f"method.template's prompt are more than the context of the model, {context} tokens"
        )
    room = context - settings.max_tokens
    return max(
        longest(label, shown_examples(codec, template.of_batch(label, ""), label, "", room))
        for label in labels
    )


def _affordable_tokens(
    config: Config, settings: PrivatePredictionSettings, most: int, before: Event | None
) -> int:
    """Return the largest r whose cost stays within the configured epsilon (calibration in r)."""

    def event(r: float) -> Event:
        return with_labels(config, private_token(config, settings, int(r)).dp_event, before)

    try:
        return int(
            calibrate(
                event,
                config.privacy.epsilon,
                config.privacy.delta,
                bracket=(1, max(most, 2)),
                increasing=True,
                integer=True,
            )
        )
    except ValueError:
        one = cost(event(1), config.privacy.delta).epsilon
        raise InputError(
            f"privacy.epsilon: {config.privacy.epsilon:g} does not pay for one private token, "
            f"which costs {one:.4f}; a larger method.batch_size or method.temperature is needed"
        ) from None
