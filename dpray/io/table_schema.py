"""Schemas: the public file of one, a JSON Schema (`.json`) or a Lark grammar (`.lark`), and which
columns a table has by its JSON Schema, and which of them may be texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

LONGEST_SCHEMA = 256 * 1024
"""The most characters of a schema."""

GRAMMARS = ("regex", "choices", "lark")
"""A mapping with only one of these keys is no JSON Schema."""


def is_grammar(schema: Mapping[str, object]) -> bool:
    """Return whether `method.schema` is one of `GRAMMARS`, and no JSON Schema."""
    return len(schema) == 1 and next(iter(schema)) in GRAMMARS


def read_schema_file(name: str) -> dict[str, object]:
    """Return a file's JSON Schema, or its grammar as `{"lark": ...}`. Raises ValueError for a file
    that cannot be read."""
    path = Path(name)
    if path.suffix not in (".json", ".lark"):
        raise ValueError(f"the file {name}: its name ends in .json (a JSON Schema) or .lark")
    try:
        if path.stat().st_size > 4 * LONGEST_SCHEMA:
            raise ValueError(f"the file {name}: more than {LONGEST_SCHEMA:,} characters")
        text = path.read_text(encoding="utf-8-sig")
        schema = {"lark": text} if path.suffix == ".lark" else json.loads(text)
    except OSError as error:
        raise ValueError(f"the file {name}: {error.strerror or 'cannot be read'}") from None
    except UnicodeDecodeError:
        raise ValueError(f"the file {name}: the bytes are not valid UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"the file {name}, line {error.lineno}: not valid JSON") from None
    except RecursionError:
        raise ValueError(f"the file {name}: nested too deeply") from None
    if not isinstance(schema, dict):
        raise ValueError(f"the file {name}: not a JSON object")
    return schema


def turns_schema(roles: Sequence[str]) -> dict[str, object]:
    """Return the JSON Schema of a conversation between `roles`: of one message if there is one
    role, else of at least two."""
    message = {
        "type": "object",
        "properties": {
            "role": {"enum": list(roles)},
            "content": {"type": "string", "minLength": 1},
        },
        "required": ["role", "content"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": message, "minItems": min(2, len(roles))}


def json_columns_of(schema: Mapping[str, object]) -> list[str]:
    """Return the columns whose values a JSON Schema does not allow to be texts: numbers, true or
    false, lists and objects."""
    return [
        name
        for name, subschema in _properties(schema).items()
        if not _may_be_text(subschema, schema)
    ]


def _properties(schema: Mapping[str, object]) -> dict[str, object]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _may_be_text(subschema: object, schema: Mapping[str, object], steps: int = 6) -> bool:
    """Return whether a property's schema may allow a text: its types say so, or its values, or any
    of its alternatives. What takes more `steps` of references to find may be a text."""
    if not isinstance(subschema, Mapping) or steps == 0:
        return True
    if "type" in subschema:
        types = subschema["type"]
        return "string" in (types if isinstance(types, list) else [types])
    values = subschema.get("enum", [subschema["const"]] if "const" in subschema else None)
    if isinstance(values, list):
        return any(isinstance(value, str) for value in values)
    if "$ref" in subschema:
        return _may_be_text(_referred(subschema["$ref"], schema), schema, steps - 1)
    for key, combine in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        if isinstance(subschema.get(key), list):
            return combine(_may_be_text(each, schema, steps - 1) for each in subschema[key])
    return True


def _referred(pointer: object, schema: Mapping[str, object]) -> object:
    """Return what `#/$defs/name` stands for, None for any other pointer."""
    parts = str(pointer).split("/")
    found: object = schema if parts[0] == "#" else None
    for part in parts[1:]:
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def check_properties(schema: Mapping[str, object], columns: Sequence[str]) -> None:
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
