"""The limits that the model's context and the machine's memory set, from public numbers only: no
model is loaded, no data opened."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

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
from dpray.types import InputError

# The context: a prompt leaves room for a text.


def prompt_room(
    template: PromptTemplate,
    labels: Collection[str],
    codec: Engine | TextCodec,
    context: int,
    max_tokens: int,
) -> tuple[int, int]:
    """Return the most tokens of a prompt without its private text, with the examples that it may
    show, and the tokens that the context leaves for a private text in any label's prompt. Raises
    InputError if a prompt, even without examples, leaves no room for a text of `max_tokens`."""
    room = context - max_tokens

    def sizes(label: str, examples: Sequence[str]) -> tuple[int, int]:
        shown = template.of_batch(label, "")
        private = frame(codec, shown, label, examples)
        return len(private), len(codec.encode(shown.public_prompt(label, examples)))

    least = max(max(sizes(label, ())) for label in labels)
    if least > room:
        key = "method.sections times method.max_tokens" if template.written else "method.max_tokens"
        raise InputError(
            f"{key}: {max_tokens} and the {least} tokens of "
            f"method.template's prompt are more than the context of the model, {context} tokens"
        )
    found = [
        sizes(label, examples)
        for label in labels
        for examples in shown_examples(codec, template.of_batch(label, ""), label, "", room)
    ]
    return max(map(max, found)), room - max(private for private, _ in found)


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
    is `engine.max_num_seqs`, or None. `text_room` is the tokens that the context leaves for a
    private text in its prompt.
    """

    row_tokens: int
    text_room: int
    token_bytes: int
    cache_bytes: int
    most_rows: int | None
    place: str

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


def codec_at_hand(engine: EngineConfig) -> TextCodec | None:
    """Return the model's tokenizer and configuration, or None if its files are not here."""
    return codec_of(engine.model, engine.max_model_len) if is_at_hand(engine.model) else None


def batch_size_and_memory(
    settings: PrivatePredictionSettings,
    engine: EngineConfig,
    template: PromptTemplate,
    labels: Collection[str],
    codec: TextCodec | None,
) -> tuple[int, BatchMemory | None]:
    """Return `batch_size`, or for auto the largest one that this machine holds at once, and the
    memory of its batches: on the GPU that `engine.gpu_memory_gib` names or this machine has, else
    on its CPU. If the model's files are not here, return the largest size, and None. Raises
    InputError if a prompt leaves no room in the model's context for a text."""
    if settings.batch_size == "auto":
        most = LARGEST_ON_CPU if gpu_memory(engine) is None else max(AUTO_SIZES)
        sizes = [s for s in AUTO_SIZES if s <= most]
    else:
        sizes = [settings.batch_size]
    if codec is None:
        return sizes[0], None
    context, drawn = context_of(engine, codec), settings.document_tokens
    longest, text_room = prompt_room(template, labels, codec, context, drawn)
    row_tokens = min(context, longest + settings.max_prompt_tokens + drawn)
    token_bytes = bytes_per_token(codec.model_config, engine.dtype)
    on_gpu = gpu_cache_bytes(engine, codec.model_config)
    place = "on one GPU" if engine.gpus == 1 else f"on {engine.gpus} GPUs"
    for s in sizes:
        rows, cache_bytes = usual_rows(s), on_gpu
        if cache_bytes is None:
            cache_bytes = cpu_cache_bytes(engine, rows * row_tokens * token_bytes)
            place = "on this machine's CPU"
        most_rows = engine.max_num_seqs if engine.kind == "vllm" else None
        memory = BatchMemory(row_tokens, text_room, token_bytes, cache_bytes, most_rows, place)
        if memory.parts(rows) == 1:
            break
    return s, memory
