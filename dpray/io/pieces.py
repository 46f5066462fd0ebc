"""Large files are read in pieces: a row has the same number however its file is cut."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pyarrow.fs
import pyarrow.parquet

from dpray.io.file_list import filesystem_of
from dpray.io.formats import FileFormat, Piece, kind_of, without_compression
from dpray.io.text_files import START, UTF_8, encoding_of, is_array
from dpray.types import InputError

READ_BYTES = 1 << 20


def cut(whole: Piece, size: int) -> list[Piece]:
    """Cut a large file into pieces of about `size` bytes: JSONL at the ends of lines, Parquet
    between its row groups. Other files are one piece, as are compressed ones, JSON arrays and
    other encodings than UTF-8. The `lines` and `rows` before a piece of JSONL are still to be
    counted (`count_rows`, `numbered`)."""
    kind, file = kind_of(whole.file), whole.file
    if kind not in ("json", "parquet") or without_compression(file)[1] is not None:
        return [whole]
    filesystem, name = filesystem_of(file)
    try:
        length = filesystem.get_file_info(name).size or 0
        if length <= size:
            return [whole]
        if kind == "parquet":
            return list(_cut_parquet(filesystem, name, whole, size))
        if not _has_lines(filesystem, name, whole.format):
            return [whole]
    except (OSError, pyarrow.ArrowException):
        return [whole]  # whoever reads it says what is wrong with it
    return [
        replace(whole, begin=begin, end=min(begin + size, length))
        for begin in range(0, length, size)
    ]


def _has_lines(filesystem: pyarrow.fs.FileSystem, name: str, form: FileFormat) -> bool:
    """Return whether the bytes of a JSON file can be cut at the ends of lines."""
    with filesystem.open_input_stream(name, compression=None) as stream:
        start = stream.read(START)
    utf_8 = encoding_of(start, form.encoding) == UTF_8 and b"\0" not in start
    return utf_8 and not is_array(start.decode("utf-8-sig", "replace"))


def _cut_parquet(
    filesystem: pyarrow.fs.FileSystem, name: str, whole: Piece, size: int
) -> Iterator[Piece]:
    with pyarrow.parquet.ParquetFile(name, filesystem=filesystem) as parquet:
        metadata = parquet.metadata
    begin, taken, rows, before = 0, 0, 0, 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        taken += group.total_byte_size
        rows += group.num_rows
        if taken >= size or number == metadata.num_row_groups - 1:
            yield replace(whole, begin=begin, end=number + 1, rows=before)
            begin, taken, before = number + 1, 0, rows


def count_rows(piece: Piece) -> tuple[int, int]:
    """Return the lines and the rows of a piece of JSONL."""
    lines = rows = 0
    try:
        for line in lines_of(piece):
            # The rule of `json_lines`; most lines need not be decoded for it.
            rows += line.startswith(b"{") or bool(line.decode("utf-8-sig", "replace").strip())
            lines += 1
    except OSError as error:
        raise InputError(f"{piece.file}: cannot be read ({type(error).__name__})") from None
    return lines, rows


def numbered(pieces: Iterable[Piece], counts: Iterable[tuple[int, int]]) -> Iterator[Piece]:
    """Yield the pieces of one file, which come in order, with what comes before each."""
    lines = rows = 0
    for piece, (more_lines, more_rows) in zip(pieces, counts, strict=True):
        yield replace(piece, lines=lines, rows=rows)
        lines, rows = lines + more_lines, rows + more_rows


def lines_of(piece: Piece) -> Iterator[bytes]:
    """Yield the lines of a piece of JSONL that has an end."""
    filesystem, name = filesystem_of(piece.file)
    end = piece.end or 0
    with filesystem.open_input_file(name) as stream:
        at = max(0, piece.begin - 1)
        stream.seek(at)
        lines = io.BufferedReader(stream, READ_BYTES)
        if piece.begin:
            at += len(lines.readline())  # the end of a line that began before, or just its "\n"
        while at < end and (line := lines.readline()):
            at += len(line)
            yield line
