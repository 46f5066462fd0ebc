"""Structure is the share of texts that are JSON records, and the share that fits a schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from dpray.types import InputError


def structure(texts: Sequence[str], schema: dict[str, Any] | None) -> dict[str, float | None]:
    """Return `json_parse_share`, the share of texts that are one JSON object or array by the strict
    grammar (no NaN), and `schema_share`, the share that also fits `schema` (None without a schema).

    Raises InputError for a schema that is not valid or that points outside itself.
    """
    values = [parse_json(text) for text in texts]
    parsed = [value for value in values if value is not None]
    return {
        "json_parse_share": len(parsed) / len(texts),
        "schema_share": None if schema is None else _fitting(parsed, schema) / len(texts),
    }


def parse_json(text: str) -> dict[str, Any] | list[Any] | None:
    """Return the JSON object or array that `text` is, or None."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict | list) else None


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _fitting(values: Sequence[Any], schema: dict[str, Any]) -> int:
    kind = validator_for(schema)
    try:
        kind.check_schema(schema)
        # An empty registry: a `$ref` out of the schema is an error, never a network request.
        validator = kind(schema, registry=Registry())
        return sum(validator.is_valid(value) for value in values)
    except SchemaError as error:
        raise InputError(f"schema: not a JSON Schema, at {error.json_path}") from None
    except Unresolvable as error:
        raise InputError(f"schema: cannot resolve $ref {error.ref!r}") from None
