"""Records of several columns and conversations are written as JSON texts, and read back from them.

A record of several columns is the JSON object of them. A conversation is the JSON array of its
messages, `{"role": ..., "content": ...}` each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from dpray.io.columns import column_of, is_empty
from dpray.io.formats import Where
from dpray.types import InputError, valid_unicode


def object_text(
    row: Mapping[str, Any], columns: Sequence[str], json_columns: Iterable[str], where: Where
) -> str:
    """Return the JSON object of a row's columns, "" if all are empty. Where cells have no types, as
    in CSV, those of `json_columns` are read as JSON, and an empty one is null. Raises InputError
    that names the row."""
    values = {name: column_of(row, name, where) for name in columns}
    if all(is_empty(value) for value in values.values()):
        return ""
    if not where.typed:
        values |= {name: _from_json(values[name], name, where) for name in json_columns}
    try:
        return valid_unicode(json.dumps(values, ensure_ascii=False, default=str))
    except (ValueError, RecursionError):
        raise InputError(f"{where}: columns {', '.join(columns)} do not fit into JSON") from None


def turns_text(
    row: Mapping[str, Any], column: str, roles: Collection[str] | None, where: Where
) -> str:
    """Return the JSON array of a row's messages, "" if none has a content. Other keys of a message
    are left out. In CSV the cell is this array. Raises InputError that names the row for a value
    that is no list of messages, or a role that is not one of `roles` (None takes any)."""
    value = column_of(row, column, where)
    if isinstance(value, str):
        value = _from_json(value, column, where)
    messages = [_message(each, column, where) for each in _list_of(value, column, where)]
    if roles is not None and not {message["role"] for message in messages} <= {*roles}:
        raise InputError(f"{where}: a role in column '{column}' is not one of data.roles")
    if all(is_empty(message["content"]) for message in messages):
        return ""
    return valid_unicode(json.dumps(messages, ensure_ascii=False))


def _from_json(cell: str, column: str, where: Where) -> Any:
    if is_empty(cell):
        return None
    try:
        return json.loads(cell, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise InputError(f"{where}: column '{column}' is not JSON") from None


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _list_of(value: Any, column: str, where: Where) -> Sequence[Any]:
    if value is None:
        return ()
    if isinstance(value, Mapping | str) or not isinstance(value, Sequence):
        raise InputError(f"{where}: column '{column}' is no list of messages")
    return value


def _message(value: Any, column: str, where: Where) -> dict[str, str]:
    if isinstance(value, Mapping):
        role, content = value.get("role"), value.get("content")
        content = "" if content is None else content  # as in a message that calls a tool
        if isinstance(role, str) and isinstance(content, str):
            return {"role": role, "content": content}
    raise InputError(f"{where}: a message in column '{column}' has no role, or no text as content")


def turns_schema(roles: Sequence[str]) -> dict[str, Any]:
    """Return the JSON Schema of a conversation between `roles`."""
    message = {
        "type": "object",
        "properties": {
            "role": {"enum": list(roles)},
            "content": {"type": "string", "minLength": 1},
        },
        "required": ["role", "content"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": message, "minItems": 1}


def json_columns_of(schema: Mapping[str, Any]) -> list[str]:
    """Return the columns that a JSON Schema does not let be texts: those of numbers, true or false,
    lists and objects."""
    return [name for name, of in _properties(schema).items() if not _may_be_text(of, schema)]


def _properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _may_be_text(of: Any, schema: Mapping[str, Any], steps: int = 6) -> bool:
    """Return whether a property's schema may allow a text: its types say so, or its values, or any
    of its alternatives. What takes more `steps` of references to find may be a text."""
    if not isinstance(of, Mapping) or steps == 0:
        return True
    if "type" in of:
        return "string" in (of["type"] if isinstance(of["type"], list) else [of["type"]])
    values = of.get("enum", [of["const"]] if "const" in of else None)
    if isinstance(values, list):
        return any(isinstance(value, str) for value in values)
    if "$ref" in of:
        return _may_be_text(_referred(of["$ref"], schema), schema, steps - 1)
    for key, combine in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        if isinstance(of.get(key), list):
            return combine(_may_be_text(each, schema, steps - 1) for each in of[key])
    return True


def _referred(pointer: Any, schema: Mapping[str, Any]) -> Any:
    """Return what `#/$defs/name` stands for, None for any other pointer."""
    parts = str(pointer).split("/")
    found: Any = schema if parts[0] == "#" else None
    for part in parts[1:]:
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def check_properties(schema: Mapping[str, Any], columns: Sequence[str]) -> None:
    """Raise ValueError unless the records of a JSON Schema are objects with all of these columns,
    in this order: prompts show them so."""
    found = [*_properties(schema)]
    if schema.get("type") != "object" or found != [*columns]:
        raise ValueError(
            f"method.schema: has to be of an object with the properties {', '.join(columns)}, as "
            f"in data.text and in its order; it has {', '.join(map(str, found)) or 'none'}"
        )
    required = schema.get("required")
    if missing := {*columns} - {*(required if isinstance(required, list) else ())}:
        first = next(name for name in columns if name in missing)
        raise ValueError(
            f"method.schema: `required` has to name every column; it lacks {first}, which a record "
            "may then leave out"
        )


def cells_of(text: str, columns: Sequence[str]) -> dict[str, Any] | None:
    """Return the columns of a released record, null for one that is left out; None if its text is
    no JSON object of any of them."""
    value = _parsed(text)
    if not isinstance(value, dict) or not value.keys() & {*columns}:
        return None
    return {name: value.get(name) for name in columns}


def turns_of(text: str) -> list[dict[str, str]] | None:
    """Return the messages of a released conversation, None if its text is no JSON array of them."""
    value = _parsed(text)
    where = Where("", 0)
    try:
        return [_message(each, "", where) for each in _list_of(value, "", where)] or None
    except InputError:
        return None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def _finite(number: str) -> float:
    """Return a number. Raises ValueError for one such as 1e999: JSON has no word for infinity, so
    no table could hold it."""
    if not math.isfinite(found := float(number)):
        raise ValueError("too large")
    return found
