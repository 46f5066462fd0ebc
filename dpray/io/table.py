"""Rows of tables and conversations become JSON texts, and released texts become rows again.

The text of a row of several columns is a JSON object with these columns as keys. The text of a
conversation is a JSON array of messages, `{"role": ..., "content": ...}` each, whatever the keys of
the file's messages are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from dpray.io.columns import ROLE_KEYS, column_of, is_empty
from dpray.io.formats import Where
from dpray.types import InputError, valid_unicode

CONTENT_KEYS = ("content", "value", "text", "parts")
"""The keys of a message's content, as OpenAI, ShareGPT and Gemini name them."""

OTHER_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant"}
"""ShareGPT's and Gemini's names of roles."""


def object_text(
    row: Mapping[str, object], columns: Sequence[str], json_columns: Iterable[str], where: Where
) -> str:
    """Return the JSON object of a row's columns, "" if all are empty. In CSV, whose cells have no
    types, those of `json_columns` are parsed as JSON; an empty one is null. NaN and infinities are
    null. Raises InputError that names the row."""
    values = {name: _finite_or_null(column_of(row, name, where)) for name in columns}
    if all(is_empty(value) for value in values.values()):
        return ""
    if not where.typed:
        values |= {name: _from_json(values[name], name, where) for name in json_columns}
    try:
        return valid_unicode(json.dumps(values, ensure_ascii=False, default=_as_text))
    except (TypeError, ValueError, RecursionError):
        raise InputError(f"{where}: columns {', '.join(columns)} do not fit into JSON") from None


def _finite_or_null(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _as_text(value: object) -> str:
    """Return a value that JSON does not have as a text. Raises TypeError for one whose text would
    differ in another process, as an object's address does: a record would have two names."""
    if isinstance(value, date | time | timedelta | Decimal | UUID | bytes):
        return str(value)
    raise TypeError(type(value).__name__)


def turns_text(
    row: Mapping[str, object], column: str, roles: Collection[str] | None, where: Where
) -> str:
    """Return the JSON array of a row's messages, "" if all contents are empty. A role goes by its
    name in `roles`, of any case; None takes any. Raises InputError as `messages_of` does, and for
    a role that is not one of `roles`."""
    messages = messages_of(row, column, where)
    for message in messages:
        if (role := role_of(message["role"], roles)) is None:
            raise InputError(f"{where}: a role in column '{column}' is not one of data.roles")
        message["role"] = role
    if all(is_empty(message["content"]) for message in messages):
        return ""
    return valid_unicode(json.dumps(messages, ensure_ascii=False))


def messages_of(row: Mapping[str, object], column: str, where: Where) -> list[dict[str, str]]:
    """Return a row's messages, each with its `role` and `content`; the other keys are left out. In
    CSV the cell holds a JSON array of them. Raises InputError that names the row for a value that
    is not a list of messages."""
    value = column_of(row, column, where)
    if isinstance(value, str):
        value = _from_json(value, column, where)
    return [_message(each, column, where) for each in _list_of(value, column, where)]


def role_of(role: str, roles: Collection[str] | None) -> str | None:
    """Return the one of `roles` that a message's role is: the same, the same in another case, or
    the one that `OTHER_ROLES` calls so; None for any other role. Without `roles`, return the role
    in small letters."""
    plain = role.strip().lower()
    other = OTHER_ROLES.get(plain, plain)
    if roles is None:
        return other
    by_name = {each.lower(): each for each in roles}
    return role if role in roles else by_name.get(plain, by_name.get(other))


def _from_json(cell: object, column: str, where: Where) -> object:
    if is_empty(cell):
        return None
    try:
        return parse_json(str(cell))
    except ValueError:
        raise InputError(f"{where}: column '{column}' is not JSON") from None


def _list_of(value: object, column: str, where: Where) -> Sequence[object]:
    if value is None:
        return ()
    if isinstance(value, Mapping) and value and all(isinstance(v, list) for v in value.values()):
        # Hugging Face's `datasets` stores a list of messages as a list for each key.
        value = [
            dict(zip(value, each, strict=False)) for each in zip(*value.values(), strict=False)
        ]
    if isinstance(value, Mapping | str) or not isinstance(value, Sequence):
        raise InputError(f"{where}: column '{column}' is not a list of messages")
    return value


def _message(value: object, column: str, where: Where) -> dict[str, str]:
    if isinstance(value, Mapping):
        role, content = _first(value, ROLE_KEYS), _content(_first(value, CONTENT_KEYS))
        if isinstance(role, str) and content is not None:
            return {"role": role, "content": content}
    raise InputError(
        f"{where}: a message in column '{column}' has no role ({' or '.join(ROLE_KEYS)}), or its "
        f"content ({', '.join(CONTENT_KEYS)}) is not a text"
    )


def _first(message: Mapping[str, object], keys: Iterable[str]) -> object:
    """Return the value of the first of the keys that has one. A Parquet file may give every message
    all keys."""
    return next((message[key] for key in keys if message.get(key) is not None), None)


def _content(value: object) -> str | None:
    """Return the text of a message's content, "" for null, as in a message that calls a tool. A
    list of parts is their texts, one a line. None for anything else."""
    if value is None or isinstance(value, str):
        return value or ""
    parts = [_part_text(each) for each in value] if isinstance(value, list | tuple) else [None]
    return None if None in parts else "\n".join(part for part in parts if part)


def _part_text(value: object) -> str | None:
    """Return the text of a part of a message, "" for a picture or another part that has none. None
    for anything else, such as a text under another key."""
    if isinstance(value, Mapping):
        is_other = "type" in value or not any(isinstance(each, str) for each in value.values())
        value = value.get("text", "" if is_other else None)
    return value if isinstance(value, str) else None


def cells_of(text: str, columns: Sequence[str]) -> dict[str, object] | None:
    """Return the columns of a released text, None for a missing one. Return None if the text is no
    JSON object, or has none of the columns."""
    value = _parsed(text)
    if not isinstance(value, dict) or not value.keys() & {*columns}:
        return None
    return {name: value.get(name) for name in columns}


def turns_of(text: str) -> list[dict[str, str]] | None:
    """Return the messages of a released text, None if it is no JSON array of messages."""
    value = _parsed(text)
    where = Where("", 0)  # no message names it
    try:
        return [_message(each, "", where) for each in _list_of(value, "", where)] or None
    except InputError:
        return None


def _parsed(text: str) -> object:
    try:
        return parse_json(text)
    except ValueError:
        return None


def parse_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError for any other text, and for what
    `json.loads` takes beyond the strict grammar: NaN, infinities, and a number such as 1e999, which
    would be infinite."""
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _finite(number: str) -> float:
    if not math.isfinite(found := float(number)):
        raise ValueError(f"{number} is not finite")
    return found
