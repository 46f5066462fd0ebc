"""A column of a row is found by its name, or by a dotted name of what is nested."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from dpray.io.formats import Where
from dpray.types import InputError, valid_unicode

MOST_NAMES = 20
MOST_LETTERS = 40
MOST_WORDS = 4

TextColumns = str | Sequence[str]
"""The column of the text, or several: a text is then a JSON object of them."""


def column_of(row: Mapping[str, Any], name: str, where: Where) -> Any:
    """Return the value of a column, None for null: that of this very name, or else of the parts of
    a dotted one. Raises InputError; at the first row it lists the columns there are."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if value is None:
            return None
        if not isinstance(value, Mapping) or part not in value:
            # Later rows of JSON may have names of their own, which are as private as values.
            listed = _there_are(row, name) if where.row == 1 else ""
            raise InputError(f"{where}: no column '{name}'{listed}")
        value = value[part]
    return value


def _there_are(row: Mapping[str, Any], name: str) -> str:
    names = [*dotted_names(row)]
    near = get_close_matches(name, names, n=1) or [
        each for each in names if each.strip().lower() == name.strip().lower()
    ]
    guess = f" (did you mean '{near[0]}'?)" if near and looks_like_name(near[0]) else ""
    return f"; there are: {listed_names(names)}{guess}"


def listed_names(names: Sequence[str]) -> str:
    """Return names of columns for a message, 20 at most. A file without a header has values in
    their place: what does not look like a name is not shown."""
    shown = [each for each in names if looks_like_name(each)]
    listed = ", ".join(shown[:MOST_NAMES]) or "none"
    more = f" and {len(shown) - MOST_NAMES} more" if len(shown) > MOST_NAMES else ""
    if hidden := len(names) - len(shown):
        more += f" (and {hidden} that look like values: has the file a header?)"
    return listed + more


def looks_like_name(name: str) -> bool:
    """Return whether a column's name is short enough to be one: 40 characters in four words."""
    return len(name) <= MOST_LETTERS and len(name.split()) <= MOST_WORDS


def dotted_names(row: Mapping[str, Any], before: str = "") -> list[str]:
    """Return the names of a row's columns, dotted for what is nested."""
    names: list[str] = []
    for key, value in row.items():
        if isinstance(value, Mapping) and value:
            names += dotted_names(value, f"{before}{key}.")
        else:
            names.append(f"{before}{key}")
    return names


def text_of(row: Mapping[str, Any], columns: TextColumns, where: Where) -> str:
    """Return a row's text, with question marks for lone surrogates, which no model reads: "" for
    null, and for several columns that are all empty. Raises InputError that names the row where a
    column is missing or holds no text."""
    if isinstance(columns, str):
        value = column_of(row, columns, where)
        if value is not None and not isinstance(value, str):
            raise InputError(f"{where}: column '{columns}' is not a text")
        return valid_unicode(value or "")
    values = {name: column_of(row, name, where) for name in columns}
    if all(is_empty(value) for value in values.values()):
        return ""
    try:
        return valid_unicode(json.dumps(values, ensure_ascii=False, default=str))
    except (ValueError, RecursionError):
        raise InputError(f"{where}: columns {', '.join(columns)} do not fit into JSON") from None


def is_empty(value: Any) -> bool:
    """Return whether a text is empty: null, or nothing but blanks. This is the one rule for
    `data.empty`."""
    return value is None or (isinstance(value, str) and not value.strip())
