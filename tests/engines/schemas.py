"""Schemas, and the tokens of the audit's vocabulary, for tests of masks."""

from __future__ import annotations

from typing import Any

B, A, DASH, Z, EOS = range(5)

FILM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "year": {"type": "integer"},
        "genres": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["title", "year", "genres"],
    "additionalProperties": False,
}

VISIT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        "date": {"type": "string", "format": "date"},
        "triage": {"enum": ["urgent", "soon", "routine"]},
        "vitals": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {"name": {"enum": ["pulse", "bp"]}, "value": {"type": "number"}},
                "required": ["name", "value"],
                "additionalProperties": False,
            },
        },
        "note": {"type": ["string", "null"]},
    },
    "required": ["id", "date", "triage", "vitals", "note"],
    "additionalProperties": False,
}
