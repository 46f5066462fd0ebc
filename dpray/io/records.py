"""Rows are read from files of many kinds, one file or many, local or in a cloud.

Errors name the file and the row, never its content.
"""

from __future__ import annotations

import io
import lzma
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, Any, cast

from dpray.io.columns import dotted_names
from dpray.io.csv_files import open_csv, read_csv
from dpray.io.file_list import filesystem_of
from dpray.io.formats import (
    AS_RECOGNISED,
    FileFormat,
    Kind,
    Piece,
    Row,
    Scanned,
    Where,
    base_name,
    kind_of,
    without_compression,
)
from dpray.io.hub import check_dataset
from dpray.io.json_files import json_lines, read_json
from dpray.io.pieces import lines_of
from dpray.io.table_files import read_arrow, read_in_any_order, read_parquet, schema_names
from dpray.io.text_files import UTF_8, encoding_of, read_txt
from dpray.types import InputError

READ_BYTES = 1 << 20

CORRUPT = (
    OSError, EOFError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, RuntimeError,
)  # fmt: skip
"""A file that cannot be read raises one of these: `zipfile` a RuntimeError for what is encrypted,
and a NotImplementedError, which is one too, for a compression that it does not know."""


def read_rows(path: str, form: FileFormat = AS_RECOGNISED) -> Iterator[tuple[Where, Row]]:
    """Stream the rows of one file of `list_files`: memory does not grow with the file.

    Raises InputError that names the row for bytes that are not in the encoding, invalid JSON or a
    short CSV line.
    """
    return read_piece(Piece(path, format=form))


def read_piece(piece: Piece) -> Iterator[tuple[Where, Row]]:
    """Stream the rows of a piece as `read_rows` does those of a file."""
    for where, row in scan_piece(piece):
        if isinstance(row, InputError):
            raise row
        yield where, row


def scan_piece(piece: Piece) -> Scanned:
    """Stream the rows of a piece, and in place of a bad row its error; the rows after it follow
    where the file can be read on. Raises InputError for a file that cannot be read at all."""
    if kind_of(piece.file) == "hub":
        yield from _read_hub(piece.file)
        return
    try:
        if piece.end is not None and kind_of(piece.file) == "json":
            lines = (line.decode("utf-8", "surrogateescape") for line in lines_of(piece))
            yield from json_lines(piece.file, lines, UTF_8, piece.format, piece.lines)
            return
        with _opened(piece.file) as (kind, stream):
            yield from _read(kind, stream, piece)
    except CORRUPT as error:
        raise _unreadable(piece.file, error) from None


def _read(kind: Kind, stream: IO[bytes], piece: Piece) -> Scanned:
    name, form = piece.file, piece.format
    if kind == "parquet":
        return read_parquet(name, stream, piece)
    if kind == "arrow":
        return read_arrow(name, stream)
    buffered = _buffered(stream)
    text_readers = {"csv": read_csv, "txt": read_txt, "json": read_json}
    return text_readers[kind](name, buffered, form)


def _buffered(stream: IO[bytes]) -> io.BufferedReader:
    return io.BufferedReader(cast(Any, stream), READ_BYTES)


@contextmanager
def _opened(file: str) -> Iterator[tuple[Kind, IO[bytes]]]:
    """Open a file and undo its compression: yield the kind of its content, and its bytes, which a
    Parquet or Arrow file has in any order. Raises InputError for a `.zip` that is not of one file,
    and OSError."""
    filesystem, name = filesystem_of(file)
    compression = without_compression(name)[1]
    with ExitStack() as stack:
        stream: Any
        if compression == "zip":
            outer: Any = stack.enter_context(filesystem.open_input_file(name))
            archive = stack.enter_context(zipfile.ZipFile(outer))
            inner = _only_member(archive, file)
            kind, stream = kind_of(inner), archive.open(inner)
        else:
            kind = kind_of(name)
            in_any_order = kind in ("parquet", "arrow") and compression is None
            if in_any_order:
                stream = filesystem.open_input_file(name)
            else:
                stream = filesystem.open_input_stream(name, compression=compression)
        stack.enter_context(stream)
        if kind in ("parquet", "arrow") and compression is not None:
            stream = stack.enter_context(read_in_any_order(stream))
        if kind is None:
            raise InputError(f"{base_name(file)}: a kind of file that is not read")
        yield kind, stream


def _only_member(archive: zipfile.ZipFile, file: str) -> str:
    """Return the name of the one file in a `.zip`; what a Mac adds does not count."""
    infos = [info for info in archive.infolist() if not info.is_dir()]
    infos = [info for info in infos if not info.filename.startswith("__MACOSX/")]
    if len(infos) != 1:
        raise InputError(f"{base_name(file)}: holds {len(infos)} files; a .zip of one is read")
    if infos[0].flag_bits & 1:
        raise InputError(f"{base_name(file)}: is encrypted; unpack it")
    if kind_of(infos[0].filename) in (None, "zip"):
        raise InputError(f"{base_name(file)}: holds a kind of file that is not read")
    if kind_of(infos[0].filename) == "txt":
        raise InputError(f"{base_name(file)}: holds a .txt file, which has no folder; unpack it")
    return infos[0].filename


def _unreadable(file: str, error: Exception) -> InputError:
    if without_compression(file)[1] is not None:
        ending = file.rsplit(".", 1)[-1].lower()
        return InputError(f"{file}: cannot be read, or is not a whole .{ending} file")
    return InputError(f"{file}: cannot be read ({type(error).__name__})")


@dataclass(frozen=True)
class Header:
    """A `Header` is what a file says before its rows. `columns` are those of its header; of JSON
    those of the first object, with dotted names for what is nested; `encoding` and `delimiter`
    those that a text file is read with."""

    kind: Kind
    columns: tuple[str, ...]
    encoding: str | None = None
    delimiter: str | None = None


def read_file_header(file: str, form: FileFormat = AS_RECOGNISED) -> Header:
    """Read a file's header: of CSV the first line, of Parquet and Arrow the schema, of JSON the
    names in the first object; no row's values are kept. Raises InputError."""
    if kind_of(file) == "hub":
        _, row = next(read_rows(file), (None, {}))
        return Header("hub", tuple(dotted_names(row)))
    try:
        with _opened(file) as (kind, stream):
            if kind in ("parquet", "arrow"):
                return Header(kind, tuple(schema_names(stream, kind)))
            buffered = _buffered(stream)
            encoding = encoding_of(buffered.peek(4), form.encoding).removesuffix("-sig")
            if kind == "txt":
                return Header(kind, ("text", "label"), encoding)
            if kind == "csv":
                csv = open_csv(file, buffered, form)
                return Header(kind, tuple(csv.columns), encoding, csv.delimiter)
            for _, found in read_json(file, buffered, form):
                if isinstance(found, InputError):
                    raise found
                return Header(kind, tuple(dotted_names(found)), encoding)
            return Header(kind, (), encoding)
    except CORRUPT as error:
        raise _unreadable(file, error) from None


def _read_hub(path: str) -> Scanned:
    try:
        from datasets import load_dataset
    except ImportError:
        raise InputError("hf:// needs the package `datasets`") from None
    check_dataset(path)
    name, _, split = path.removeprefix("hf://").partition("#")
    rows = load_dataset(name, split=split or "train", streaming=True)
    for number, row in enumerate(rows, start=1):
        yield Where(path, number), row
