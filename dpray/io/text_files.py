"""JSON, CSV and plain text files: how they are decoded, and their rows."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any

from dpray.io.columns import looks_like_name, value_at
from dpray.io.formats import (
    FileFormat,
    Row,
    Scanned,
    Where,
    base_name,
    folder_columns,
    row_of,
    without_compression,
)
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

START = 1 << 16
"""Characters that tell whether JSON is an array."""

LONGEST_ARRAY = 256 << 20
LONGEST_TXT = 64 << 20
LONGEST_ROW = 64 << 20
"""Characters of a JSON array, which is read at once, of a text, and of a line of JSON or a row of
CSV. A file of one endless line would take all memory."""

DELIMITERS = (",", ";", "\t", "|")

_SEPARATOR = re.compile(r'"?sep=(\\t|[^"\r\n])"?[,;\t|]*[\r\n]*$', re.IGNORECASE)
"""Matches the first line by which Excel names the delimiter; it may be padded as other rows are."""

MOST_TITLES = 20
"""Lines above a header that `titles_above` finds at most."""

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
    InputError for what seems to be UTF-16 without a byte order mark, unless the encoding is
    given."""
    start = stream.peek(START)[:START]
    encoding = encoding_of(start, form.encoding)
    if form.encoding is None and encoding == UTF_8 and has_nulls(start):
        if not (found := unmarked_utf_16(start)):
            raise InputError(f"{base_name(name)}: many bytes are null, as in no text")
        advice = f"set {form.keys}encoding={found}" if form.keys else "save the file in UTF-8"
        why = f"{found} without a byte order mark"
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
        label = {} if folder_columns(name) else {"label": name.split("/")[-2]}
        yield where, {"text": text} | label


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


def _object_in(text: str) -> Row | None:
    """Return the object that is all of a text, None for anything else, such as several lines."""
    try:
        found = json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _one_object(name: str, found: Row, text: str, encoding: str, form: FileFormat) -> Scanned:
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


def _object(where: Where, line: str) -> Row | InputError:
    try:
        row = json.loads(line, object_pairs_hook=row_of)
    except (ValueError, RecursionError):  # a number of 5,000 digits is a ValueError
        return InputError(f"{where}: not valid JSON (one object a line)")
    return _if_object(where, row)


def _if_object(where: Where, value: Any) -> Row | InputError:
    if isinstance(value, dict):
        return value
    hint = f"; pandas writes objects by {PANDAS}" if isinstance(value, list) else ""
    return InputError(f"{where}: not a JSON object{hint}")


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
    entries: list[Any] = []
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


def _no_records(found: Row) -> str | None:
    """Return what a file of one JSON object is, if that is no record."""
    if "$schema" in found or ("properties" in found and found.get("type") == "object"):
        return "a JSON Schema, and no records; move it elsewhere, or name the others by a glob"
    if {"run_id", "state"} <= found.keys() or {"epsilon", "mechanisms"} <= found.keys():
        return "the description of a run, and no records; its records are in synthetic.jsonl"
    return None


class _TooLong(csv.Error):
    """A row of CSV has more than LONGEST_ROW characters."""


class _RowLines:
    """The lines of CSV. A row may have many, if line ends stand in its quotes."""

    def __init__(self, lines: io.TextIOWrapper) -> None:
        self._lines = lines
        self._left = LONGEST_ROW

    def begin_row(self) -> None:
        """Let the next lines be those of a new row."""
        self._left = LONGEST_ROW

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._left < 0:
            raise StopIteration
        line = self._lines.readline(self._left + 1)
        self._left -= len(line)
        if self._left < 0:
            raise _TooLong
        if not line:
            raise StopIteration
        return line


@dataclass(frozen=True)
class OpenCsv:
    """CSV after its header; `cells` yields those of each row, made of `lines`."""

    encoding: str
    delimiter: str
    columns: Sequence[str]
    cells: Iterator[list[str]]
    lines: _RowLines


def open_csv(name: str, stream: io.BufferedReader, form: FileFormat) -> OpenCsv:
    """Read the header: the first line after `form.skip_rows` that is not blank. A first line such
    as `sep=;`, which Excel writes and reads, names the delimiter. Raises InputError for a header
    that cannot be read."""
    csv.field_size_limit(LONGEST_ROW)
    header = f"{base_name(name)}, header"
    encoding, decoded = text_lines(name, stream, form, newline="")
    lines = _RowLines(decoded)
    try:
        first, sign = _header_line(lines, form.skip_rows)
        dialect = _dialect(first, name, form if form.delimiter else replace(form, delimiter=sign))
        cells = csv.reader(chain([first], lines), **dialect)
        columns = next(cells, [])
    except _TooLong:
        raise too_long(header) from None
    except csv.Error:
        raise _not_csv(header, form) from None
    if undecodable("".join(columns)):
        raise bad_bytes(header, encoding, form)
    return OpenCsv(encoding, dialect["delimiter"], columns, cells, lines)


def _header_line(lines: _RowLines, skip_rows: int) -> tuple[str, str | None]:
    """Return the line of the header, and the delimiter that a first line `sep=;` names."""
    line = next(lines, "").removeprefix("\ufeff")
    sign = None
    if found := _SEPARATOR.match(line):
        sign = "\t" if found[1] == "\\t" else found[1]
        skip_rows = max(skip_rows, 1)
    for _ in range(skip_rows):
        lines.begin_row()
        line = next(lines, "")
    while line and not line.strip("\r\n "):
        line = next(lines, "")
    return line, sign


def read_csv(
    name: str,
    stream: io.BufferedReader,
    form: FileFormat,
    reads: Callable[[str], bool] = lambda column: True,
) -> Scanned:
    """Read CSV by Python's own parser, which is strict and counts rows. A blank line is no row.
    Cells have to be in the encoding if `reads` takes their column. Raises InputError for the
    header."""
    opened = open_csv(name, stream, form)
    number = 1
    while True:
        where = Where(name, number, typed=False)
        opened.lines.begin_row()
        try:
            cells = next(opened.cells)
        except StopIteration:
            return
        except _TooLong:
            yield where, too_long(where)
            return
        except csv.Error:
            yield where, _not_csv(where, form)
        else:
            if not cells:
                continue
            yield where, _csv_row(where, opened, cells, form, reads)
        number += 1


def _csv_row(
    where: Where,
    opened: OpenCsv,
    cells: Sequence[str],
    form: FileFormat,
    reads: Callable[[str], bool],
) -> Row | InputError:
    width = len(opened.columns)
    if len(cells) > width and not any(cells[width:]):
        cells = cells[:width]  # programs end rows with delimiters that the header lacks
    if len(cells) != width:
        why = "too many; quote cells that hold the delimiter"
        if len(cells) < width:
            why = "too few; correct the row, or remove it if it is a total"
        elif width == 1 and form.keys == "data.":
            why += ", and count titles above the header in data.skip_rows"
        return InputError(f"{where}: not as many fields as the header has: {why}")
    row = list(zip(opened.columns, cells, strict=True))
    if any(undecodable(cell) and reads(column) for column, cell in row):
        return bad_bytes(where, opened.encoding, form)
    return row_of(row)


def titles_above(name: str, stream: io.BufferedReader, form: FileFormat) -> int:
    """Return the number of lines above the header of CSV that seem to be titles, 0 in doubt: the
    first of them has one cell that is filled, and the header has more, as have the rows below."""
    _, decoded = text_lines(name, stream, form, newline="")
    lines = list(islice(_RowLines(decoded), MOST_TITLES + 30))
    found = [
        _header_of(lines, _dialect("", name, replace(form, delimiter=sign)))
        for sign in (DELIMITERS if form.delimiter is None else form.delimiter)
    ]
    return max(found, key=lambda line_and_names: line_and_names[1])[0]


def _header_of(lines: Sequence[str], dialect: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of lines above the header, and of its names; zeros if it is the first line,
    or none seems to be one."""
    reader = csv.reader(lines, **dialect)
    rows: list[tuple[int, list[str]]] = []
    with suppress(csv.Error):
        rows.extend((reader.line_num, cells) for cells in reader)
    for number, (line, names) in enumerate(rows[:MOST_TITLES]):
        below = [cells for _, cells in rows[number + 1 :] if cells]
        is_table = len(below) > 1 and all(len(cells) == len(names) for cells in below)
        if _filled(names) > 1 and is_table and max(map(_filled, below)) <= _filled(names):
            are_names = all(looks_like_name(each) and not each.isdigit() for each in names)
            above = [cells for _, cells in rows[:number]]
            are_titles = all(_is_title(cells, names) for cells in above)
            return (line - 1, len(names)) if are_names and are_titles else (0, 0)
    return 0, 0


def _is_title(cells: Sequence[str], names: Sequence[str]) -> bool:
    """Return whether a line above a header is no header itself: it has another number of cells than
    all lines below, or most are empty."""
    if len(cells) != len(names) or not _filled(cells):
        return True
    return bool(cells[0].strip()) and _filled(cells) <= len(names) // 2


def _filled(cells: Sequence[str]) -> int:
    return sum(bool(cell.strip()) for cell in cells)


def _not_csv(place: Where | str, form: FileFormat) -> InputError:
    if form.keys is None:
        return InputError(f"{place}: not valid CSV")
    keys = ", ".join(f"{form.keys}{key}" for key in ("delimiter", "quote", "escape"))
    return InputError(f"{place}: not valid CSV (its keys: {keys})")


def _dialect(first: str, name: str, form: FileFormat) -> dict[str, Any]:
    """Return the arguments of `csv.reader` for a file with this first line. A delimiter that is not
    given is the one that divides the header into most names; a comma in doubt."""
    shared: dict[str, Any] = {
        "strict": True,
        "quotechar": form.quote or None,
        "quoting": csv.QUOTE_MINIMAL if form.quote else csv.QUOTE_NONE,
        "escapechar": form.escape,
    }

    def names(delimiter: str) -> int:
        try:
            return len(next(csv.reader([first], delimiter=delimiter, **shared), []))
        except csv.Error:
            return 0

    tabs = without_compression(name)[0].lower().endswith(".tsv")
    delimiter = form.delimiter or ("\t" if tabs else max(DELIMITERS, key=names))
    return shared | {"delimiter": delimiter}
