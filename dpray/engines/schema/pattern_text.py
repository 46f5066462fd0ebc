"""Short texts that the regular expressions of a schema match: how a text can get out of a loop such
as `.*`, which takes any byte."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from re import _parser as parser  # type: ignore[attr-defined]  # no public module parses
from typing import Any

from dpray.engines.schema.schema import Schema

MOST_PATTERNS = 16
"""No texts are made for further patterns of a schema."""

LONGEST_TEXT = 1000
"""The most characters of such a text."""

OTHERS = "a0 -"
"""One of these characters stands for any that a negated set does not name."""

CATEGORIES = {
    "CATEGORY_DIGIT": "0",
    "CATEGORY_SPACE": " ",
    "CATEGORY_WORD": "a",
    "CATEGORY_NOT_DIGIT": "a",
    "CATEGORY_NOT_SPACE": "a",
    "CATEGORY_NOT_WORD": "-",
}


def pattern_texts(schema: Schema) -> list[str]:
    """Return a text for each regular expression of a schema, written as in a text of the schema. A
    text is a guess: its expression need not match it, or may stand where no text can have it."""
    texts: list[str] = []
    for pattern in list(dict.fromkeys(_patterns(schema)))[:MOST_PATTERNS]:
        with suppress(re.error, OverflowError, RecursionError, ValueError):
            with warnings.catch_warnings(action="ignore"):
                text = _text(parser.parse(pattern))
            is_json = schema.kind == "json"
            texts.append(json.dumps(text, ensure_ascii=False)[1:-1] if is_json else text)
    return [text for text in texts if text]


def _patterns(schema: Schema) -> Iterator[str]:
    if schema.kind == "regex":
        yield schema.text
    elif schema.kind == "json":
        yield from _values_of("pattern", json.loads(schema.text))


def _values_of(key: str, value: object) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get(key), str):
            yield value[key]
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _values_of(key, each)


def _text(parts: Any) -> str:
    text = "".join(_part(str(kind), value) for kind, value in parts)
    if len(text) > LONGEST_TEXT:
        raise ValueError("too long")
    return text


def _part(kind: str, value: Any) -> str:
    """Return a short text of a part of a pattern, as `re` parses it."""
    match kind:
        case "LITERAL":
            return chr(value)
        case "NOT_LITERAL" | "ANY":
            return _other([(value, value)] if kind == "NOT_LITERAL" else [])
        case "IN":
            return _member(value)
        case "BRANCH":
            return min(map(_text, value[1]), key=len)
        case "SUBPATTERN" | "ATOMIC_GROUP":
            return _text(value[-1] if kind == "SUBPATTERN" else value)
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            return _text(value[2]) * min(int(value[0]), LONGEST_TEXT + 1)
    return ""


def _member(items: Any) -> str:
    """Return a character of a set such as `[a-z]` or `[^@]`."""
    kind, value = items[0]
    match str(kind):
        case "NEGATE":
            ranges = [each if str(of) == "RANGE" else (each, each) for of, each in items[1:]]
            return _other([each for each in ranges if isinstance(each[0], int)])
        case "CATEGORY":
            return CATEGORIES[str(value)]
    return chr(value if str(kind) == "LITERAL" else value[0])


def _other(ranges: list[tuple[int, int]]) -> str:
    """Return a character outside of these ranges."""
    for each in OTHERS:
        if not any(low <= ord(each) <= high for low, high in ranges):
            return each
    raise ValueError("none is known")
