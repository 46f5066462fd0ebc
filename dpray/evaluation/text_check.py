"""The owner's check of texts: those that miss keys of `method.schema`, and those in base64."""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from dpray.config.sections import MethodSettings, TextSettings
from dpray.extras import Late
from dpray.io.table import parse_json
from dpray.io.table_schema import is_grammar

# Late: most runs have no schema.
referencing, validators = Late("referencing"), Late("jsonschema.validators")

if TYPE_CHECKING:
    from jsonschema import ValidationError

Misfits = Callable[[str], set[tuple[str, str]]]
"""Returns the keys of the schema that a text does not fit, each with what is wrong. Both are of the
schema, and so public."""

RECORD = "the record"

PACKED = re.compile(r"(?:data:[\w/.+;=-]*;base64,)?([A-Za-z0-9+/_-]{16,}={0,2})")

CODES = 64
"""A text of so many codes is base64, if it decodes, also where the content is no text."""


def misfits_of(method: MethodSettings) -> Misfits | None:
    """Return what finds the misfits of `method.schema`, None if it is no JSON Schema."""
    schema = method.schema if isinstance(method, TextSettings) else None
    if schema is None or is_grammar(schema):
        return None
    # An empty registry: nothing is fetched for a `$ref`.
    validator = validators.validator_for(schema)(schema, registry=referencing.Registry())

    def misfits(text: str) -> set[tuple[str, str]]:
        try:
            value = parse_json(text)
        except ValueError:
            return {(RECORD, "is not JSON")}
        return {each for error in validator.iter_errors(value) for each in _problems(error)}

    return misfits


def _problems(error: ValidationError) -> Iterator[tuple[str, str]]:
    path = iter(map(str, error.absolute_schema_path))
    names = [next(path, "") for part in path if part == "properties"]
    rule, value = error.validator, error.validator_value
    instance = error.instance
    if rule == "required" and isinstance(value, list) and isinstance(instance, dict):
        for name in value:
            if name not in instance:
                yield ".".join([*names, str(name)]), "is missing"
    else:
        problem = f"is not of type {value}" if rule == "type" else f"does not fit `{rule}`"
        yield ".".join(names) or RECORD, problem


def is_base64(text: object) -> bool:
    """Return whether a text is base64: it decodes into a text, or it is long and has capital and
    small letters and digits without a blank."""
    found = (
        PACKED.fullmatch(re.sub(r"[\r\n]+", "", text.strip())) if isinstance(text, str) else None
    )
    if found is None:
        return False
    codes = found[1].rstrip("=").translate(str.maketrans("-_", "+/"))
    try:
        content = b64decode(codes + "=" * (-len(codes) % 4), validate=True)
    except (binascii.Error, ValueError):
        return False
    try:
        decoded = content.decode("utf-8")
    except UnicodeDecodeError:
        kinds = ("[A-Z]", "[a-z]", "[0-9]")
        return len(codes) >= CODES and all(re.search(kind, codes) for kind in kinds)
    return all(c.isprintable() or c.isspace() for c in decoded)
