"""CSV is read by Python's own parser, which is strict and counts rows."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from dpray.io.formats import FileFormat, Row, Scanned, Where, base_name, without_compression
from dpray.io.text_files import bad_bytes, text_lines, undecodable
from dpray.types import InputError

DELIMITERS = (",", ";", "\t", "|")


@dataclass(frozen=True)
class OpenCsv:
    """An `OpenCsv` is CSV after its header: `cells` gives those of each row."""

    encoding: str
    delimiter: str
    columns: Sequence[str]
    cells: Iterator[list[str]]


def open_csv(name: str, stream: io.BufferedReader, form: FileFormat) -> OpenCsv:
    """Read the header, the first line. Raises InputError for one that cannot be read."""
    csv.field_size_limit(2**31 - 1)
    header = f"{base_name(name)}, header"
    encoding, lines = text_lines(name, stream, form, newline="")
    try:
        first = lines.readline().removeprefix("\ufeff")
        arguments = dialect(first, name, form)
        cells = csv.reader(chain([first], lines), **arguments)
        columns = next(cells, [])
    except UnicodeError:
        raise bad_bytes(header, encoding, form) from None
    except csv.Error:
        raise not_csv(header, form) from None
    if undecodable("".join(columns)):
        raise bad_bytes(header, encoding, form)
    if len(set(columns)) < len(columns):
        raise InputError(f"{base_name(name)}: the header names a column twice")
    return OpenCsv(encoding, arguments["delimiter"], columns, cells)


def read_csv(name: str, stream: io.BufferedReader, form: FileFormat) -> Scanned:
    """Read CSV; a blank line is no row. Raises InputError for its header."""
    opened = open_csv(name, stream, form)
    number = 0
    while True:
        where = Where(name, number + 1, typed=False)
        try:
            cells = next(opened.cells)
        except StopIteration:
            return
        except csv.Error:
            yield where, not_csv(where, form)
        except UnicodeError:
            yield where, bad_bytes(where, opened.encoding, form)
            return
        else:
            if not cells:
                continue
            yield where, _row(where, opened, cells, form)
        number += 1


def _row(where: Where, opened: OpenCsv, cells: Sequence[str], form: FileFormat) -> Row | InputError:
    if any(map(undecodable, cells)):
        return bad_bytes(where, opened.encoding, form)
    if len(cells) != len(opened.columns):
        return InputError(f"{where}: not as many fields as the header has")
    return dict(zip(opened.columns, cells, strict=True))


def not_csv(place: Where | str, form: FileFormat) -> InputError:
    if form.keys is None:
        return InputError(f"{place}: not valid CSV")
    keys = ", ".join(f"{form.keys}{key}" for key in ("delimiter", "quote", "escape"))
    return InputError(f"{place}: not valid CSV (its keys: {keys})")


def dialect(first: str, name: str, form: FileFormat) -> dict[str, Any]:
    """Return the arguments of `csv.reader` for a file with this first line."""
    shared: dict[str, Any] = {
        "strict": True,
        "quotechar": form.quote or None,
        "quoting": csv.QUOTE_MINIMAL if form.quote else csv.QUOTE_NONE,
        "escapechar": form.escape,
    }
    if form.delimiter is not None:
        return shared | {"delimiter": form.delimiter}
    tabs = without_compression(name)[0].lower().endswith(".tsv")
    return shared | {"delimiter": "\t" if tabs else delimiter_of(first, shared)}


def delimiter_of(first: str, shared: dict[str, Any]) -> str:
    """Return the delimiter that divides a header into most names; a comma in doubt."""

    def names(delimiter: str) -> int:
        try:
            return len(next(csv.reader([first], delimiter=delimiter, **shared), []))
        except csv.Error:
            return 0

    return max(DELIMITERS, key=names)
