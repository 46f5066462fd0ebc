"""A JSON file that is one object, as exports and pandas write them: where its rows may be.

Its keys may be data, such as the names of people. They are shown where they lead to a list of rows,
and only if they do not look like data.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from dpray.io.columns import keys_are_data
from dpray.io.formats import FileFormat
from dpray.types import ReadOnlyJson

AS_LINES = "records are lines of JSON, or an array"

KEY_PATTERN = re.compile(r"[\w.$:@-]{1,60}")
"""Matches a key of a program, which is one word."""

PANDAS = 'df.to_json("FILE.jsonl", orient="records", lines=True)'


def where_rows_are(found: ReadOnlyJson, form: FileFormat) -> str:
    """Return the part of an error that says how the rows of such a file can be read."""
    if orient := _orient(found):
        if orient == "table" and form.keys is not None:
            return f"pandas wrote it with orient=table; set {form.keys}records=data"
        return f"pandas writes such a file with orient={orient}; write it by {PANDAS}"
    if all(isinstance(each, list) for each in found.values()) and _are_columns(found.values()):
        return f"it has a list for each column; write it by {PANDAS}"
    names = [*_lists(found)]
    if not names or form.keys is None or not all(map(KEY_PATTERN.fullmatch, names)):
        return AS_LINES
    if len(names) == 1:
        return f"set {form.keys}records={names[0]} to read the list in it"
    return f"set {form.keys}records to the list of the records, one of {', '.join(names)}"


def _orient(found: ReadOnlyJson) -> str | None:
    """Return the `orient` of pandas' `to_json` that writes such an object."""
    data, schema = found.get("data"), found.get("schema")
    if isinstance(schema, Mapping) and "fields" in schema and isinstance(data, list):
        return "table"
    if isinstance(data, list) and isinstance(found.get("columns"), list):
        return "split"
    inner = [*found.values()]
    if not inner or not all(isinstance(each, Mapping) for each in inner):
        return None
    numbers = [found, *inner] if len(inner) == 1 else []
    if keys_are_data(found) or any(each and all(map(str.isdecimal, each)) for each in numbers):
        return "columns or index"
    return None


def _are_columns(lists: Collection[Sequence[object]]) -> bool:
    """Return whether lists are columns of one table: of one length, and not of objects."""
    are_plain = not any(isinstance(each, Mapping | list) for cells in lists for each in cells[:1])
    return are_plain and len(lists) > 1 and len({len(cells) for cells in lists}) == 1


def _lists(found: Mapping[str, object], before: str = "") -> Iterator[str]:
    """Yield the dotted names of the lists of objects in an object. None if its keys may be data."""
    if keys_are_data(found):
        return
    for key, value in found.items():
        if isinstance(value, Mapping):
            yield from _lists(value, f"{before}{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            yield f"{before}{key}"
