"""The limits that the model's context, the machine's memory and the epsilon set, from public
numbers only: no model is loaded, no data opened."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from dpray.accounting.accountant import calibrate
from dpray.config.sections import EngineConfig
from dpray.engines.base import Engine
from dpray.engines.kv_cache import (
    GIB,
    bytes_per_token,
    cpu_cache_bytes,
    gpu_cache_bytes,
    gpu_memory,
)
from dpray.engines.model_path import is_at_hand
from dpray.engines.text import TextCodec, codec_of
from dpray.engines.vllm.model import context_of
from dpray.methods.private_prediction.prompts import PromptTemplate, frame, shown_examples
from dpray.methods.private_prediction.settings import PrivatePredictionSettings
from dpray.runs.plan import Plan, is_within_epsilon
from dpray.types import InputError

# The context: a prompt leaves room for a text.


def longest_frame(
    template: PromptTemplate,
    labels: Collection[str],
    codec: Engine | TextCodec,
    context: int,
    max_tokens: int,
) -> int:
    """Return the most tokens of a prompt without its private text, with the examples that it may
    show. Raises InputError if a prompt, even without examples, leaves no room in the model's
    context for a text of `max_tokens`."""

    def longest(label: str, examples: Sequence[str]) -> int:
        shown = template.of_batch(label, "")
        public = codec.encode(shown.public_prompt(label, examples))
        return max(len(frame(codec, shown, label, examples)), len(public))

    least = max(longest(label, ()) for label in labels)
    if least + max_tokens > context:
        key = "method.sections times method.max_tokens" if template.written else "method.max_tokens"
        raise InputError(
            f"{key}: {max_tokens} and the {least} tokens of "
            f"method.template's prompt are more than the context of the model, {context} tokens"
        )
    room = context - max_tokens
    return max(
        longest(label, examples)
        for label in labels
        for examples in shown_examples(codec, template.of_batch(label, ""), label, "", room)
    )


def text_room(
    template: PromptTemplate,
    labels: Collection[str],
    codec: TextCodec,
    context: int,
    max_tokens: int,
) -> int:
    """Return the tokens that the context leaves for a private text in any label's prompt."""

    def left(label: str) -> int:
        shown, room = template.of_batch(label, ""), context - max_tokens
        examples = shown_examples(codec, shown, label, "", room)
        return room - max(len(frame(codec, shown, label, each)) for each in examples)

    return min(map(left, labels))


# The memory: the rows that are decoded at once.

AUTO_SIZES = (127, 63, 31, 15, 7, 3, 1)
"""`batch_size: auto` takes the first of these that fits: the paper's least, and smaller ones."""

LARGEST_ON_CPU = 31
"""`batch_size: auto` is at most this on a CPU, where a text takes as long as its batch is large."""

SPREAD = 5.0
"""A batch rarely has more records than this many standard deviations above its mean."""


def usual_rows(mean: float) -> int:
    """Return the number of rows, the public prompt's included, that a batch of `mean` expected
    records rarely exceeds."""
    return math.ceil(mean + SPREAD * math.sqrt(mean)) + 1


@dataclass(frozen=True)
class BatchMemory:
    """The rows that the engine holds at once in `place`.

    A row has at most `row_tokens` tokens: its prompt, with a text of `method.max_prompt_tokens`,
    and what is drawn. Each token takes `token_bytes` in the KV cache of `cache_bytes`. `most_rows`
    is `engine.max_num_seqs`, or None.
    """

    row_tokens: int
    token_bytes: int
    cache_bytes: int
    most_rows: int | None
    place: str
    text_room: int = 0
    """The tokens that the context leaves for a private text in its prompt."""

    @property
    def rows_at_once(self) -> int:
        rows = self.cache_bytes // (self.row_tokens * self.token_bytes)
        return max(1, rows if self.most_rows is None else min(rows, self.most_rows))

    def parts(self, rows: int) -> int:
        """Return the number of parts in which a batch of `rows` rows is decoded."""
        return -(-rows // self.rows_at_once)

    def summary(self, rows: int) -> dict[str, object]:
        return {
            "row_tokens": self.row_tokens,
            "text_room": self.text_room,
            "kv_cache_bytes": self.cache_bytes,
            "kv_cache_bytes_per_token": self.token_bytes,
            "rows_at_once": self.rows_at_once,
            "rows_of_a_batch": rows,
            "parts": self.parts(rows),
        }

    def describe(self, rows: int) -> str:
        how = "whole" if self.parts(rows) == 1 else f"in {self.parts(rows)} parts"
        return (
            f"{self.rows_at_once} rows of {self.row_tokens} tokens at once, in "
            f"{self.cache_bytes / GIB:.1f} GiB of KV cache {self.place}; batches of up to about "
            f"{rows} rows are decoded {how}"
        )

    def warnings(self, rows: int) -> list[str]:
        """Warn of batches of `rows` rows that do not fit."""
        if self.parts(rows) == 1:
            return []
        return [
            f"method.batch_size: batches of up to about {rows} rows do not fit the "
            f"{self.rows_at_once} rows that the engine holds {self.place}: the others are "
            "computed again for every token, which is slow. A smaller method.batch_size (auto "
            "takes what fits) or method.max_prompt_tokens helps, or a larger "
            "engine.max_num_seqs, engine.kv_cache_gib (CPU) or GPU"
        ]


def batch_memory(
    engine: EngineConfig, model_config: object, row_tokens: int, rows: int
) -> BatchMemory:
    """Return the memory of batches of `rows` rows, on the GPU that `engine.gpu_memory_gib` names or
    this machine has, else on its CPU."""
    token_bytes = bytes_per_token(model_config, engine.dtype)
    most = engine.max_num_seqs if engine.kind == "vllm" else None
    on_gpu = gpu_cache_bytes(engine, model_config)
    if on_gpu is not None:
        place = "on one GPU" if engine.gpus == 1 else f"on {engine.gpus} GPUs"
        return BatchMemory(row_tokens, token_bytes, on_gpu, most, place)
    cache_bytes = cpu_cache_bytes(engine, rows * row_tokens * token_bytes)
    return BatchMemory(row_tokens, token_bytes, cache_bytes, most, "on this machine's CPU")


def codec_at_hand(engine: EngineConfig) -> TextCodec | None:
    """Return the model's tokenizer and configuration, or None if its files are not here."""
    return codec_of(engine.model, engine.max_model_len) if is_at_hand(engine.model) else None


def affordable_batch_size(
    settings: PrivatePredictionSettings,
    engine: EngineConfig,
    template: PromptTemplate,
    labels: Collection[str],
    codec: TextCodec | None,
) -> tuple[int, BatchMemory | None]:
    """Return `batch_size`, or for auto the largest one that this machine holds at once, and the
    memory of its batches. If the model's files are not here, return the largest size, and None.
    Raises InputError if a prompt leaves no room in the model's context for a text."""
    if settings.batch_size == "auto":
        most = LARGEST_ON_CPU if gpu_memory(engine) is None else max(AUTO_SIZES)
        sizes = [s for s in AUTO_SIZES if s <= most]
    else:
        sizes = [settings.batch_size]
    if codec is None:
        return sizes[0], None
    context = context_of(engine, codec)
    drawn = settings.document_tokens
    longest = longest_frame(template, labels, codec, context, drawn)
    row_tokens = min(context, longest + settings.max_prompt_tokens + drawn)
    for s in sizes:
        memory = batch_memory(engine, codec.model_config, row_tokens, usual_rows(s))
        if memory.parts(usual_rows(s)) == 1:
            break
    left = text_room(template, labels, codec, context, drawn)
    return s, replace(memory, text_room=left)


# The budget: tokens of a batch, or texts.

P = TypeVar("P", bound=Plan)


class TooExpensive(InputError):
    """A plan of the least size, which is `what`, costs more than `privacy.epsilon`. Its cost is
    computed when the message is read: that may take seconds, and a comparison reads one of many."""

    def __init__(self, least: Plan, what: str) -> None:
        super().__init__(least, what)
        self.least, self.what = least, what

    def __str__(self) -> str:
        return (
            f"privacy.epsilon: {self.least.config.privacy.epsilon:g} does not pay for {self.what}, "
            f"which costs {self.least.cost.epsilon:.4f}; a larger method.batch_size or "
            "method.temperature is needed"
        )


def largest_affordable(plan_of: Callable[[int], P], most: int, what: str) -> P:
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
