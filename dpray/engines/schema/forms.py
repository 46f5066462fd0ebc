"""Combines `method.schema` with a model: checks it for a plan, and opens the mask of a text."""

from __future__ import annotations

from functools import cache

import numpy as np

from dpray.config.sections import EngineConfig
from dpray.engines.model_path import is_at_hand
from dpray.engines.schema.schema import Form, Schema, read_schema
from dpray.engines.schema.token_mask import TokenMask, Vocabulary, first_mask
from dpray.engines.text import codec_of
from dpray.types import InputError, Json, ReadOnlyJson

MOST_BEGINNINGS = 2_000
"""A schema whose texts have more beginnings counts as one of infinitely many texts."""


def vocabulary(model: str, size: int | None = None) -> Vocabulary:
    """Return the vocabulary of a model with logits of length `size`, by default of as many tokens
    as it can read."""
    return _vocabulary(model, size or codec_of(model, None).readable)


@cache
def _vocabulary(model: str, size: int) -> Vocabulary:
    return codec_of(model, None).vocabulary(size)


def forced_tokens(form: Form, max_tokens: int) -> int:
    """Return the number of forced tokens in the shortest text that is found. Raises InputError if
    the schema does not fit the model, the beginning or `max_tokens`."""
    mask = open_mask(**form.mask_arguments(max_tokens))
    forced = 0
    for token in list(mask.ending):
        forced += np.count_nonzero(mask.allowed) == 1
        mask.take(token)
    return int(forced)


def most_free_tokens(form: Form, max_tokens: int) -> int:
    """Return the most tokens of a text that its schema leaves a choice about, or an estimate.

    If the schema has few texts, all of their beginnings are looked at, in every division into
    tokens. A text that is closed has fewer. Otherwise the estimate is `max_tokens` less the forced
    tokens of the shortest text that is found. If a text has more, it is closed early: no text gets
    more private tokens than were charged."""
    found = open_mask(**form.mask_arguments(max_tokens)).most_choices(MOST_BEGINNINGS)
    bound = max_tokens - forced_tokens(form, max_tokens) if found is None else found
    return max(1, min(bound, max_tokens))


def schema_for(value: Json | None, engine: EngineConfig, max_tokens: int) -> Schema | None:
    """Return the schema of `method.schema`, None without one. Raises InputError if it cannot be
    read, if the engine takes none, or, where the model's files are on this machine, if no text of
    it fits into `max_tokens`."""
    if value is None:
        return None
    schema = read_schema(value)
    if not engine.is_local:
        raise InputError("method.schema: is for engine.kind vllm and transformers")
    if is_at_hand(engine.model):
        forced_tokens(Form(schema, engine.model), max_tokens)
    return schema


def open_mask(
    schema: ReadOnlyJson, model: str, before: str, max_tokens: int, size: int | None = None
) -> TokenMask:
    """Return the mask at the beginning of a text. The arguments are the fields of a `Form`, the
    most tokens of the text, and the length of the model's logits."""
    return first_mask(Schema(**schema), vocabulary(model, size), max_tokens, before)
