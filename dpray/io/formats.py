"""The kinds of files with records, and the options of text files.

A file's kind follows from the ending of its name, in any case; `.gz`, `.zst`, `.bz2` or `.zip` may
follow.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal
from urllib.parse import unquote

from dpray.types import InputError

FileRow = dict[str, object]

Content = Literal["json", "csv", "parquet", "arrow", "xlsx", "txt", "eml", "mbox"]
"""The kinds of a file's content, without its compression."""

FileKind = Content | Literal["zip", "hub"]

CONTENTS: dict[str, Content] = {
    ".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".tsv": "csv",
    ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow",
    ".txt": "txt", ".xlsx": "xlsx", ".eml": "eml", ".mbox": "mbox",
}  # fmt: skip

ONE_TEXT = ("txt", "eml")
"""The kinds of which a file is one record, and its folder a label."""

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}

ENDINGS = f"{', '.join(CONTENTS)}, also with {', '.join(COMPRESSIONS)} or .zip"


@dataclass(frozen=True)
class FileFormat:
    """Options that the bytes of a text file may not tell; None is recognised.

    `delimiter`, of CSV: by default the one of `,`, `;`, tab and `|` that divides the header.
    `quote`: around a cell that holds delimiters or line ends; "" for none.
    `escape`: before a quote within a cell; None if quotes are doubled.
    `encoding`: by default UTF-8, or what a byte order mark says.
    `skip_rows`: lines above the header of CSV, or rows above that of a sheet.
    `records`, of JSON: the dotted name of the list that has the rows, in an object; of `.xlsx`: the
    name of the sheet.
    `keys`: the beginning of the keys that set these, for errors; None if there are none.
    """

    delimiter: str | None = None
    quote: str = '"'
    escape: str | None = None
    encoding: str | None = None
    skip_rows: int = 0
    keys: str | None = None
    records: str | None = None


AS_RECOGNISED = FileFormat()


_CODE = re.compile(r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})")


def one_sign(delimiter: str | None) -> str | None:
    """Return a delimiter, a tab for `\\t` and `tab`, and the character with a code such as `\\x01`.
    Raises ValueError."""
    if delimiter in ("\\t", "tab"):
        return "\t"
    if found := _CODE.fullmatch(delimiter or ""):
        delimiter = chr(int(found[1] or found[2], 16))
    if delimiter is not None and (
        len(delimiter) != 1 or re.match("[\0\r\n\ud800-\udfff]", delimiter)
    ):
        raise ValueError("one character, or \\t for a tab, or a code such as \\x01")
    return delimiter


def quote_sign(quote: str) -> str:
    """Return the sign around a cell, "" for none. Raises ValueError."""
    return one_sign(quote) or "" if quote else ""


def known_encoding(encoding: str | None) -> str | None:
    """Return the name of an encoding that Python knows. Raises ValueError."""
    try:
        "".encode(encoding or "utf-8")
    except (LookupError, ValueError):
        raise ValueError("not an encoding of texts that Python knows") from None
    return encoding


@dataclass(frozen=True)
class FilePart:
    """A part of a file: the lines of JSONL that begin between the bytes `begin` and `end`, or the
    row groups of Parquet with these numbers. Without `end` it is the whole file.

    `lines` and `rows` come before it, so that its rows have the numbers that they have in the whole
    file; a blank line is no row. `file_number` counts all files from 0, and stays when their folder
    moves. The file has to have the digest `sha256` when the part is read; None: any. `columns` are
    the names of the columns that are read; None reads all."""

    file: str
    begin: int = 0
    end: int | None = None
    lines: int = 0
    rows: int = 0
    file_number: int = 0
    format: FileFormat = AS_RECOGNISED
    sha256: bytes | None = field(default=None, repr=False)
    columns: frozenset[str] | None = None

    def reads(self, name: str) -> bool:
        """Return whether a column of the file is read: one of `columns`, or what the first part of
        a dotted name leads to."""
        named = self.columns
        return named is None or name in named or any(c.partition(".")[0] == name for c in named)


@dataclass(frozen=True)
class Where:
    """A row's place, for error messages. Rows count from 1, without a CSV's header; of JSONL, lines
    count. 0 is the last row, if its number is not known. The cells of a `typed` file may be
    numbers, true or false; in others all are texts. An error about a column ends with the `hint`,
    if there is one, and then names no column. No key is shown of the nested objects in `varied`,
    which are dotted names. A sheet's rows are shown with the numbers that they have
    there: `above` come before the first."""

    file: str
    row: int
    typed: bool = True
    hint: str = field(default="", compare=False)
    varied: frozenset[str] = field(default=frozenset(), compare=False)
    above: int = field(default=0, compare=False)

    def __str__(self) -> str:
        row = f"row {self.row + self.above}" if self.row else "the last row"
        return f"{base_name(self.file)}, {row}"


def base_name(file: str) -> str:
    return file.rsplit("/", 1)[-1]


def kind_of(file: str) -> FileKind | None:
    """Return a file's kind by its name, None for one that is not read. What a `.zip` holds, only
    its content tells."""
    if file.startswith("hf://"):
        return "hub"
    name, compression = without_compression(base_name(file).lower())
    if compression == "zip":
        return "zip"
    return next((kind for ending, kind in CONTENTS.items() if name.endswith(ending)), None)


def without_compression(file: str) -> tuple[str, str | None]:
    """Return a file's name without the ending of its compression, and the compression."""
    if file.lower().endswith(".zip"):
        return file[: -len(".zip")], "zip"
    for ending, compression in COMPRESSIONS.items():
        if file.lower().endswith(ending):
            return file[: -len(ending)], compression
    return file, None


Scanned = Iterator[tuple[Where, FileRow | InputError]]
"""The rows of a file, and in place of a bad row its error, which names the file and the row."""


class Twice:
    """The value of a column that a file names twice: an error only if the column is used."""


TWICE = Twice()


def row_of(cells: Sequence[tuple[str, object]]) -> FileRow:
    """Return the row of these names and values. A name that is there twice has the value TWICE."""
    row = dict(cells)
    if len(row) < len(cells):
        counts = Counter(name for name, _ in cells)
        row |= {name: TWICE for name, count in counts.items() if count > 1}
    return row


HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


def folder_columns(file: str) -> FileRow:
    """Return the columns that the folders right above a file name, as in
    `label=Billing/part-0.parquet`. Their values are texts without a type, as those of CSV are, or
    None."""
    above = file.split("#")[0].split("/")[-2::-1]
    named = [part.partition("=") for part in takewhile(lambda part: "=" in part[1:], above)]
    return row_of(
        [
            (unquote(name), None if value == HIVE_NULL else unquote(value))
            for name, _, value in named
        ]
    )
