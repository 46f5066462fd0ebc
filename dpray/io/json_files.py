"""JSON is read line by line, or as an array of objects."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from dpray.io.formats import FileFormat, Row, Scanned, Where, base_name
from dpray.io.text_files import bad_bytes, text_lines, undecodable
from dpray.types import InputError

PEEKED = 1 << 16
"""So many signs tell what a file of JSON is; an array is read in parts of this size."""

BLANKS = " \t\r\n"


def read_json(name: str, stream: io.BufferedReader, form: FileFormat) -> Scanned:
    """Read lines of JSON, or an array of objects, which its first sign tells."""
    encoding, lines = text_lines(name, stream, form, newline="\n")
    try:
        start = lines.read(PEEKED)
        start += lines.readline()
    except UnicodeError:
        yield Where(name, 1), bad_bytes(Where(name, 1), encoding, form)
        return
    if is_array(start):
        yield from _read_array(name, _Array(start, lines), encoding, form)
    elif why := _no_records(start):
        yield Where(name, 1), InputError(f"{base_name(name)}: {why}")
    else:
        # Only "\n" ends a line of JSON.
        first = io.StringIO(start, newline="\n")
        yield from json_lines(name, chain(first, lines), encoding, form)


def is_array(start: str) -> bool:
    return start.lstrip("\ufeff" + BLANKS).startswith("[")


def json_lines(
    name: str, lines: Iterable[str], encoding: str, form: FileFormat, before: int = 0
) -> Scanned:
    """Read lines of JSON; `before` lines of the file come before them. A blank line is no row."""
    number = before
    try:
        for number, line in enumerate(lines, start=before + 1):
            where = Where(name, number)
            if number == 1:
                line = line.removeprefix("\ufeff")
            if undecodable(line):
                yield where, bad_bytes(where, encoding, form)
            elif line.strip():
                yield where, _object(where, line)
    except UnicodeError:
        where = Where(name, number + 1)
        yield where, bad_bytes(where, encoding, form)


def _object(where: Where, line: str) -> Row | InputError:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # a number of 5,000 digits is a ValueError
        return InputError(f"{where}: not valid JSON (one object a line)")
    return row if isinstance(row, dict) else InputError(f"{where}: not a JSON object")


def _no_records(start: str) -> str | None:
    """Return what a file of one JSON object is, if that is no record."""
    try:
        found = json.loads(start.removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    if "$schema" in found or ("properties" in found and found.get("type") == "object"):
        return "a JSON Schema, and no records; move it elsewhere, or name the others by a glob"
    if {"run_id", "state"} <= found.keys() or {"epsilon", "mechanisms"} <= found.keys():
        return "the description of a run, and no records; its records are in synthetic.jsonl"
    if "\n" in start.strip():
        return "one JSON object over several lines; records are lines of JSON, or an array"
    return None


def _read_array(name: str, array: _Array, encoding: str, form: FileFormat) -> Scanned:
    try:
        for row, source in array.values():
            where = Where(name, array.begun)
            if undecodable(source):
                yield where, bad_bytes(where, encoding, form)
            elif isinstance(row, dict):
                yield where, row
            else:
                yield where, InputError(f"{where}: not a JSON object")
    except UnicodeError:
        where = Where(name, array.begun)
        yield where, bad_bytes(where, encoding, form)
    except (ValueError, RecursionError):
        where = Where(name, array.begun)
        yield where, InputError(f"{where}: not valid JSON (an array of objects)")


class _Array:
    """The values of an array, which is read in parts. (ijson's C parser takes memory of the square
    of the depth, and refuses numbers of more than 64 bits.)"""

    def __init__(self, start: str, rest: io.TextIOWrapper) -> None:
        self.begun = 1
        self._text, self._rest, self._at = start.removeprefix("\ufeff"), rest, 0
        self._decoder = json.JSONDecoder()

    def values(self) -> Iterator[tuple[Any, str]]:
        """Yield each value and its source. Raises ValueError or RecursionError at what is no
        JSON."""
        self._take("[")
        if self._next() != "]":
            yield self._value()
            while self._next() == ",":
                self._take(",")
                self.begun += 1
                yield self._value()
        self._take("]")
        if self._next():
            raise ValueError("the file goes on after its array")

    def _take(self, sign: str) -> None:
        if self._next() != sign:
            raise ValueError(f"no {sign}")
        self._at += 1

    def _next(self) -> str:
        """Return the next sign that is not blank, "" at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in BLANKS:
                    return self._text[self._at]
                self._at += 1
            if not self._more(PEEKED):
                return ""

    def _more(self, size: int) -> bool:
        more = self._rest.read(size)
        self._text, self._at = self._text[self._at :] + more, 0
        return bool(more)

    def _value(self) -> tuple[Any, str]:
        size = PEEKED
        self._next()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
                break
            except json.JSONDecodeError as error:
                # An error at the end may be because a part of the value is still to be read.
                near_end = error.pos > len(self._text) - 16
                if not (near_end or error.msg.startswith("Unterminated")) or not self._more(size):
                    raise
                size *= 2
        source, self._at = self._text[self._at : end], end
        return value, source
