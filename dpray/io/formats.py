"""Names and options of files with records: their kinds, and how a text file is written.

A kind follows from a name's ending, whatever its case; `.gz`, `.zst` and `.zip` may follow it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from dpray.types import InputError

Row = dict[str, Any]

Kind = Literal["json", "csv", "parquet", "arrow", "txt", "zip", "hub"]

KINDS: dict[str, Kind] = {
    ".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".tsv": "csv",
    ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow", ".txt": "txt",
}  # fmt: skip

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}

ENDINGS = f"{', '.join(KINDS)}, also with {', '.join(COMPRESSIONS)} or .zip"


@dataclass(frozen=True)
class FileFormat:
    """A `FileFormat` is what a text file's own bytes do not settle; None is recognised.

    `delimiter` is that of CSV: by default `,`, `;`, a tab or `|`, whichever the header has. `quote`
    stands around a cell that holds delimiters or line ends, "" for none; within it a quote is
    doubled, or follows `escape`. `encoding` is by default UTF-8, or what a byte order mark says.
    `keys` begins the names of the keys that set these, for errors; None where no keys do.
    """

    delimiter: str | None = None
    quote: str = '"'
    escape: str | None = None
    encoding: str | None = None
    keys: str | None = None


AS_RECOGNISED = FileFormat()


def one_sign(delimiter: str | None) -> str | None:
    """Return a delimiter, a tab for the `\\t` that a shell passes. Raises ValueError."""
    if delimiter == "\\t":
        return "\t"
    if delimiter is not None and (len(delimiter) != 1 or delimiter in "\r\n"):
        raise ValueError("one character, or \\t for a tab")
    return delimiter


def known_encoding(encoding: str | None) -> str | None:
    """Return the name of an encoding that Python knows. Raises ValueError."""
    try:
        "".encode(encoding or "utf-8")
    except (LookupError, ValueError):
        raise ValueError("not an encoding of texts that Python knows") from None
    return encoding


@dataclass(frozen=True)
class Piece:
    """A `Piece` is a part of a file: of JSONL the lines that begin from byte `begin` on and before
    byte `end`, of Parquet the row groups from `begin` on and before `end`; without `end`, the whole
    file. `lines` and `rows` come before it in the file, so that its rows have the numbers that they
    have in the whole file. A blank line is no row. `file_number` is the file's, from 0, in the
    order of all files: it stays when their folder moves."""

    file: str
    begin: int = 0
    end: int | None = None
    lines: int = 0
    rows: int = 0
    file_number: int = 0
    format: FileFormat = AS_RECOGNISED


@dataclass(frozen=True)
class Where:
    """Names a row's place in error messages: rows count from 1, without a CSV's header; of JSONL,
    lines count. The cells of a `typed` file may be numbers, true or false; in others all are
    texts."""

    file: str
    row: int
    typed: bool = True

    def __str__(self) -> str:
        return f"{base_name(self.file)}, row {self.row}"


def base_name(file: str) -> str:
    return file.rsplit("/", 1)[-1]


def kind_of(file: str) -> Kind | None:
    """Return a file's kind by its name, None for one that is not read. What a `.zip` holds, only
    its content tells."""
    if file.startswith("hf://"):
        return "hub"
    name, compression = without_compression(base_name(file).lower())
    if compression == "zip":
        return "zip"
    return next((kind for ending, kind in KINDS.items() if name.endswith(ending)), None)


def without_compression(file: str) -> tuple[str, str | None]:
    """Return a file's name without the ending of its compression, and the compression."""
    if file.lower().endswith(".zip"):
        return file[: -len(".zip")], "zip"
    for ending, compression in COMPRESSIONS.items():
        if file.lower().endswith(ending):
            return file[: -len(ending)], compression
    return file, None


Scanned = Iterator[tuple[Where, Row | InputError]]
"""The rows of a file, and in place of a bad row its error, which names the file and the row."""
