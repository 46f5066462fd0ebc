"""CSV: its header, what may stand above it, and its rows."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import PurePath
from typing import Any

from dpray.io.columns import looks_like_name
from dpray.io.formats import (
    FileFormat,
    FileRow,
    Scanned,
    Where,
    base_name,
    row_of,
    without_compression,
)
from dpray.io.text_files import (
    LONGEST_ROW,
    MARKS,
    UTF_8,
    bad_bytes,
    text_lines,
    too_long,
    undecodable,
)
from dpray.types import InputError

DELIMITERS = (",", ";", "\t", "|")

DELIMITER_OF = {".tsv": "\t"}
"""The endings that say it."""

_SEPARATOR = re.compile(r'"?sep=(\\t|[^"\r\n])"?[,;\t|]*[\r\n]*$', re.IGNORECASE)
"""Matches the first line by which Excel names the delimiter; it may be padded as other rows are."""

MOST_TITLES = 20
"""Lines above a header that `titles_above` finds at most."""


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


def last_row(
    name: str,
    start: bytes,
    tail: bytes,
    opened: OpenCsv,
    form: FileFormat,
    reads: Callable[[str], bool],
) -> tuple[Where, FileRow | InputError] | None:
    """Return the last row of a file of CSV by its first bytes and its last ones, which begin at a
    multiple of 4. None if they do not tell it: their line may be the end of a cell that has
    several."""
    if (text := _last_line(start, tail, opened.encoding)) is None:
        return None
    where = Where(name, 0, typed=False)
    dialect = _dialect("", name, replace(form, delimiter=opened.delimiter))
    if form.quote:
        with suppress(csv.Error):
            next(csv.reader([f"{form.quote}\n", text], **dialect))
            return None
    try:
        cells = next(csv.reader([text], **dialect), [])
    except csv.Error:
        return where, _not_csv(where, form)
    return where, _csv_row(where, opened, cells, form, reads)


def _last_line(start: bytes, tail: bytes, encoding: str) -> str | None:
    """Return the last line that is not empty; None if the bytes do not tell it."""
    line_end = "\n".encode("utf-8" if encoding == UTF_8 else encoding)
    if line_end == b"\n":
        _, found, line = tail.rstrip(b"\r\n").rpartition(b"\n")
        with suppress(UnicodeError):
            return line.decode(encoding, "surrogateescape") if found else None
        return None
    if not codecs.lookup(encoding).name.startswith(("utf-16", "utf-32")):
        return None
    # The mark tells the order of bytes. Half a character may only be before the line.
    mark = next((mark for mark in MARKS if start.startswith(mark)), b"")
    decoded = (mark + tail).decode(encoding, "replace")
    _, is_line, text = decoded.rstrip("\r\n").rpartition("\n")
    return text if is_line and "\ufffd" not in text else None


def _csv_row(
    where: Where,
    opened: OpenCsv,
    cells: Sequence[str],
    form: FileFormat,
    reads: Callable[[str], bool],
) -> FileRow | InputError:
    width = len(opened.columns)
    if len(cells) > width and not any(cells[width:]):
        cells = cells[:width]  # programs end rows with delimiters that the header lacks
    if len(cells) != width:
        why = "too many; quote cells that hold the delimiter"
        if len(cells) < width:
            why = "too few; correct the row, or remove it if it is a total"
        elif width == 1 and form.keys is not None:
            key = "skip_rows" if form.keys == "data." else "skip-rows"
            why += f", and count titles above the header in {form.keys}{key}"
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
    given is that of the file's ending, or the one that divides the header into most names; a comma
    in doubt."""
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

    ending = PurePath(without_compression(name)[0].lower()).suffix
    delimiter = form.delimiter or DELIMITER_OF.get(ending) or max(DELIMITERS, key=names)
    return shared | {"delimiter": delimiter}
