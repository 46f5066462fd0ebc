"""JSON and plain text files: how they are decoded, and their rows."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import Any

from dpray.io.columns import value_at
from dpray.io.formats import FileFormat, FileRow, Scanned, Where, base_name, folder_columns, row_of
from dpray.io.one_object import PANDAS, where_rows_are
from dpray.types import InputError

UTF_8 = "utf-8-sig"
UTF_8_MARK = b"\xef\xbb\xbf"
MARKS = {
    b"\xff\xfe\0\0": "utf-32",
    b"\0\0\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}

ESCAPES = {b"\x1b$B": "iso2022_jp", b"\x1b$@": "iso2022_jp", b"\x1b$)C": "iso2022_kr"}
"""The escape sequences by which encodings of ASCII bytes begin other letters. As UTF-8, the codes
of these letters would be taken for words."""

START = 1 << 16
"""Characters that tell whether JSON is an array."""

LONGEST_ARRAY = 256 << 20
LONGEST_TXT = 64 << 20
LONGEST_ROW = 64 << 20
"""Characters of a JSON array, which is read at once, of a text, and of a line of JSON or a row of
CSV. A file of one endless line would take all memory."""

_UNDECODABLE = re.compile("[\udc80-\udcff]")
"""`surrogateescape` makes these of bytes that are not in the encoding; no encoding has them."""


def encoding_of(start: bytes, given: str | None) -> str:
    """Return the encoding of a file by its first bytes: the given one, or what a byte order mark
    says, or UTF-8."""
    if given is not None:
        return UTF_8 if given.lower().replace("_", "-") in ("utf-8", "utf8") else given
    return next((MARKS[mark] for mark in MARKS if start.startswith(mark)), UTF_8)


def text_lines(
    name: str, stream: io.BufferedReader, form: FileFormat, newline: str
) -> tuple[str, io.TextIOWrapper]:
    """Return a file's encoding and its lines. Bytes that are not in the encoding are left as lone
    surrogates; if the encoding has no place for them, reading raises UnicodeError. Raises
    InputError for what seems to be UTF-16 without a byte order mark, and for an encoding of bytes
    that are all ASCII, unless the encoding is given."""
    start = stream.peek(START)[:START]
    encoding = encoding_of(start, form.encoding)
    if form.encoding is None and encoding == UTF_8:
        found = next((each for mark, each in ESCAPES.items() if mark in start), None)
        why = f"{found}"
        if has_nulls(start):
            if not (found := unmarked_utf_16(start)):
                raise InputError(f"{base_name(name)}: many bytes are null, as in no text")
            why = f"{found} without a byte order mark"
        if found is not None:
            advice = f"set {form.keys}encoding={found}" if form.keys else "save the file in UTF-8"
            raise InputError(f"{base_name(name)}: the bytes seem to be {why}; {advice}")
    return encoding, io.TextIOWrapper(stream, encoding, "surrogateescape", newline=newline)


def has_nulls(start: bytes) -> bool:
    """Return whether the first bytes of a text file are not of an encoding with ASCII characters of
    one byte: more than a few of them are null."""
    return b"\0" in start[:4] or start.count(0) > max(2, len(start) // 200)


def unmarked_utf_16(start: bytes) -> str | None:
    """Return the kind of UTF-16 that bytes with nulls seem to be: ASCII characters, at least line
    ends, have a null byte each, all on the same side."""
    odd, even = start[1::2].count(0), start[::2].count(0)
    if min(odd, even) * 5 > max(odd, even):
        return None
    return "utf-16-le" if odd > even else "utf-16-be"


def undecodable(text: str) -> bool:
    """Return whether `text_lines` left bytes in a text that are not in the encoding."""
    return not text.isascii() and _UNDECODABLE.search(text) is not None


def bad_bytes(place: Where | str, encoding: str, form: FileFormat) -> InputError:
    """Return the error for bytes that are not in the encoding. What else they may be in, one row
    does not tell."""
    named = "UTF-8" if encoding == UTF_8 else encoding
    advice = "save the file in UTF-8"
    if form.keys is not None:
        found = " (`dpray check` lists what fits)" if form.keys == "data." else ""
        advice += f", or set {form.keys}encoding{found}"
    return InputError(f"{place}: the bytes are not valid {named}; {advice}")


def read_txt(name: str, stream: io.BufferedReader, form: FileFormat) -> Scanned:
    """Read a file that is one text: a row with its `text`, without the last line's end, and as
    `label` the name of its folder."""
    where = Where(name, 1, typed=False)
    encoding, lines = text_lines(name, stream, form, newline="")
    text = lines.read(LONGEST_TXT)
    if undecodable(text):
        yield where, bad_bytes(where, encoding, form)
    elif len(text) == LONGEST_TXT:
        yield where, InputError(f"{base_name(name)}: too long for one text")
    else:
        text = text.removeprefix("\ufeff").removesuffix("\n").removesuffix("\r")
        yield where, {"text": text} | folder_label(name)


def folder_label(name: str) -> FileRow:
    """Return the column that the folder of a file with one record is, unless its name has one."""
    return {} if folder_columns(name) else {"label": name.split("/")[-2]}


def read_json(name: str, stream: io.BufferedReader, form: FileFormat) -> Scanned:
    """Read lines of JSON, or an array of objects, which its first character tells; with
    `form.records`, the objects of a list within the file."""
    # Only "\n" ends a line of JSON.
    encoding, lines = text_lines(name, stream, form, newline="\n")
    start = lines.read(START) + lines.readline(LONGEST_ROW + 1)
    is_list = form.records is not None or is_array(start)
    text = start + (lines.read(LONGEST_ARRAY) if is_list or _goes_on(start) else "")
    more = lines.readline(LONGEST_ROW + 1)
    if is_list and more:
        why = f"{base_name(name)}: too long an array; save it as JSON Lines"
        yield Where(name, 1), InputError(why)
    elif is_list:
        yield from _array(name, text, encoding, form)
    elif not more and (found := _object_in(text)) is not None:
        yield from _one_object(name, found, text, encoding, form)
    else:
        further = iter(partial(lines.readline, LONGEST_ROW + 1), "")
        every = chain(io.StringIO(text, "\n"), [more] if more else (), further)
        yield from json_lines(name, every, encoding, form)


def _goes_on(start: str) -> bool:
    """Return whether the first line is the beginning of an object over several lines."""
    line = start.removeprefix("\ufeff").lstrip().partition("\n")[0].rstrip()
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        return line.startswith("{") and error.pos >= len(line) - 1
    except (ValueError, RecursionError):
        pass
    return False


def _object_in(text: str) -> FileRow | None:
    """Return the object that is all of a text, None for anything else, such as several lines."""
    try:
        found = json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _one_object(name: str, found: FileRow, text: str, encoding: str, form: FileFormat) -> Scanned:
    """Read a file that is one object: in one line, it may be the only record."""
    hint = where_rows_are(found, form)
    if why := _no_records(found):
        yield Where(name, 1), InputError(f"{base_name(name)}: {why}")
    elif "\n" in text.strip():
        why = f"one JSON object over several lines; {hint}"
        yield Where(name, 1), InputError(f"{base_name(name)}: {why}")
    else:
        hint = f"the file is one JSON object; {hint}"
        yield from json_lines(name, io.StringIO(text, "\n"), encoding, form, hint=hint)


def is_array(start: str) -> bool:
    return start.removeprefix("\ufeff").lstrip(" \t\r\n").startswith("[")


def json_lines(
    name: str,
    lines: Iterable[str],
    encoding: str,
    form: FileFormat,
    before: int = 0,
    hint: str = "",
) -> Scanned:
    """Read lines of JSON; `before` lines of the file come before them. A blank line is no row. A
    line of more than LONGEST_ROW characters, of which the rest may be missing, is the last."""
    for number, line in enumerate(lines, start=before + 1):
        where = Where(name, number, hint=hint)
        if len(line) > LONGEST_ROW:
            yield where, too_long(where)
            return
        if number == 1:
            line = line.removeprefix("\ufeff")
        if undecodable(line):
            yield where, bad_bytes(where, encoding, form)
        elif line.strip():
            yield where, _object(where, line)


def too_long(place: Where | str) -> InputError:
    return InputError(f"{place}: longer than {LONGEST_ROW:,} characters")


def _object(where: Where, line: str) -> FileRow | InputError:
    try:
        row = json.loads(line, object_pairs_hook=row_of)
    except (ValueError, RecursionError):  # a number of 5,000 digits is a ValueError
        return InputError(f"{where}: not valid JSON (one object a line)")
    return _if_object(where, row)


def _if_object(where: Where, value: Any) -> FileRow | InputError:
    if isinstance(value, dict):
        return value
    hint = 'write each record as one, such as {"text": "..."}'
    if isinstance(value, list):
        hint = f"pandas writes objects by {PANDAS}"
    return InputError(f"{where}: not a JSON object; {hint}")


def _array(name: str, text: str, encoding: str, form: FileFormat) -> Scanned:
    """Read an array of objects, or the lists that `form.records` leads to."""
    if found := _UNDECODABLE.search(text):
        line = text.count("\n", 0, found.start()) + 1
        yield Where(name, 1), bad_bytes(f"{base_name(name)}, line {line}", encoding, form)
        return
    try:
        rows = _loaded(text.removeprefix("\ufeff"), form)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        what = "an array of objects" if form.records is None else "an object that has the records"
        problem = f"line {line}: not valid JSON ({what})"
        yield Where(name, 1), InputError(f"{base_name(name)}, {problem}")
        return
    except LookupError as error:
        yield Where(name, 1), InputError(f"{base_name(name)}: {error.args[0]}")
        return
    for number, row in enumerate(rows, start=1):
        where = Where(name, number)
        yield where, _if_object(where, row)


def _loaded(text: str, form: FileFormat) -> list[Any]:
    """Return the entries of an array, or of the lists that `form.records` leads to: in an object,
    or in each of several, which are pages of an export. Raises LookupError for another name."""
    try:
        found = json.loads(text, object_pairs_hook=row_of)
    except ValueError:
        pages = [line for line in text.split("\n") if line.strip()]
        if form.records is None or len(pages) < 2 or _goes_on(text):
            raise
        found = [json.loads(page, object_pairs_hook=row_of) for page in pages]
    if form.records is None:
        return list(found)
    entries: list[object] = []
    for page in found if isinstance(found, list) else [found]:
        try:
            inner = value_at(page, form.records)
        except LookupError:
            inner = page
        if not isinstance(inner, list | None):
            hint = f"; {where_rows_are(page, form)}" if isinstance(page, dict) else ""
            raise LookupError(f"{form.keys}records: '{form.records}' leads to no list{hint}")
        entries += inner or ()
    return entries


def _no_records(found: FileRow) -> str | None:
    """Return what a file of one JSON object is, if that is no record."""
    if "$schema" in found or ("properties" in found and found.get("type") == "object"):
        return "a JSON Schema, and no records; move it elsewhere, or name the others by a glob"
    if {"run_id", "state"} <= found.keys() or {"epsilon", "mechanisms"} <= found.keys():
        return "the description of a run, and no records; its records are in synthetic.jsonl"
    return None
