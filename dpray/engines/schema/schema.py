"""A schema is what all texts of a run have to match: a JSON Schema, a regular expression, a list of
choices, or a grammar in Lark's notation. It is public."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from dpray.extras import Late
from dpray.io.table_schema import LONGEST_SCHEMA, is_grammar
from dpray.types import InputError, Json

if TYPE_CHECKING:
    import llguidance
    from llguidance._lib import JsonCompileOptions
else:
    llguidance = Late("llguidance")

JSON_STYLE: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""JSON is written as `json.dumps` writes it: private records are shown in the same style."""


@dataclass(frozen=True)
class Schema:
    """`text` is the schema's source; for choices, a JSON list."""

    kind: Literal["json", "regex", "choices", "lark"]
    text: str

    @property
    def title(self) -> str:
        """Return what the schema is, in words."""
        titles = {"json": "a JSON Schema", "regex": "a regular expression", "lark": "a grammar"}
        return titles.get(self.kind, "a list of choices")

    @cached_property
    def grammar(self) -> str:
        """Return the schema as llguidance reads it. Raises ValueError for one that it cannot."""
        match self.kind:
            case "regex":
                return llguidance.LLMatcher.grammar_from_regex(self.text)
            case "lark":
                return llguidance.LLMatcher.grammar_from_lark(self.text)
            case "choices":
                # An uppercase rule, a terminal, may have thousands of alternatives.
                choices = " | ".join(map(json.dumps, json.loads(self.text)))
                return llguidance.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        return llguidance.LLMatcher.grammar_from_json_schema(self.text, overrides=JSON_STYLE)


@dataclass(frozen=True)
class Form:
    """A schema for the texts of `model`. `before` is the part of a text that stands in the prompt
    already."""

    schema: Schema
    model: str
    before: str = ""

    def mask_arguments(self, max_tokens: int) -> Json:
        """Return all arguments of `open_mask` except `size`, as plain values."""
        return asdict(self) | {"max_tokens": max_tokens}


def read_schema(value: dict[str, object]) -> Schema:
    """Read `method.schema`: a JSON Schema, or a mapping with `regex`, `choices` or `lark`. Raises
    InputError for one that cannot be read or compiled, or is too large."""
    try:
        if is_grammar(value):
            schema = _of_kind(*next(iter(value.items())))
        else:
            schema = Schema("json", json.dumps(value))
        if len(schema.text) > LONGEST_SCHEMA:
            raise ValueError(f"more than {LONGEST_SCHEMA:,} characters")
        _check_compiles(schema)
    except (TypeError, ValueError, RecursionError) as error:  # YAML has dates, JSON has none
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"method.schema: {reason or type(error).__name__}") from None
    return schema


def _of_kind(kind: Any, source: Any) -> Schema:
    if kind == "choices":
        if not isinstance(source, list) or not source or not all(map(_is_text, source)):
            raise ValueError("choices: a list of non-empty texts")
        return Schema(kind, json.dumps(source))
    if not _is_text(source):
        raise ValueError(f"{kind}: a non-empty text")
    return Schema(kind, source)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _check_compiles(schema: Schema) -> None:
    """Compile a schema for an alphabet of bytes. Raises ValueError if that fails."""
    is_wrong, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
        schema.grammar, limits=compile_limits()
    )
    if is_wrong:
        raise ValueError(messages[0])


def compile_limits() -> llguidance.LLParserLimits:
    """Return limits that bound the time of compiling a schema, and of one mask of it."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=500_000,
        max_grammar_size=20_000,
        step_max_items=5_000,
        step_lexer_fuel=100_000,
        verbose_errors=False,
    )
