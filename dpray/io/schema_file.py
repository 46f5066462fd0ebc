"""The file of a schema, which is public: a JSON Schema (`.json`) or a Lark grammar (`.lark`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LONGEST_SCHEMA = 256 * 1024
"""The most characters of a schema."""

GRAMMARS = ("regex", "choices", "lark")
"""A mapping with one of these keys alone is no JSON Schema."""


def is_grammar(schema: Mapping[str, Any]) -> bool:
    """Return whether `method.schema` is one of `GRAMMARS`, and no JSON Schema."""
    return len(schema) == 1 and next(iter(schema)) in GRAMMARS


def read_schema_file(name: str) -> dict[str, Any]:
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
