"""Rows are read from JSONL, CSV or Parquet, one file or many, local or in a cloud.

Errors name the file and the row, never its content.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pyarrow.fs
import pyarrow.parquet

from dpray.types import InputError, first_line, valid_unicode

PASSWORD = re.compile(r"\w[\w+.-]*://[^@/]*:(?!\d+/)[^@]*@")
"""It matches the beginning of a URI with a password, which may hold a slash and is not a port."""

READERS = 8
"""So many files are hashed at once: a core hashes about as fast as a disk reads, or faster."""

READ_BYTES = 1 << 20

SUFFIXES = (".jsonl", ".json", ".ndjson", ".csv", ".parquet")


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


@dataclass(frozen=True)
class Where:
    """Names a row's place in error messages: rows count from 1, without a CSV's header."""

    file: str
    row: int

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}, row {self.row}"


def list_files(path: str, key: str = "data.path") -> list[str]:
    """List the files that a path, a folder, a glob (`*`, `?`) or a cloud URI names, sorted.

    It opens none of them. Raises InputError that names `key` where there is none, and for a URI
    with a password: a release holds its configuration.
    """
    if PASSWORD.match(path):
        raise InputError(f"{key}: a password has no place in it; give it in the environment")
    if path.startswith("hf://"):
        return [path]
    try:
        filesystem, root = _filesystem(path)
        if any(sign in root for sign in "*?"):
            files = _glob(filesystem, root)
        else:
            info = filesystem.get_file_info(root)
            files = [root] if info.is_file else []
            if info.type == pyarrow.fs.FileType.Directory:
                files = _glob(filesystem, root.rstrip("/") + "/*")
    except (OSError, ValueError, RuntimeError, pyarrow.ArrowException) as error:
        raise InputError(f"{key}: {path}: {first_line(error)}") from None
    files = [file for file in files if file.endswith(SUFFIXES)]
    if not files:
        raise InputError(f"{key}: no such file, or none of {', '.join(SUFFIXES)}: {path}")
    scheme = path.split("://", 1)[0] + "://" if "://" in path else ""
    return [scheme + file for file in sorted(files)]


def _filesystem(path: str) -> tuple[pyarrow.fs.FileSystem, str]:
    if "://" in path:
        found: tuple[pyarrow.fs.FileSystem, str] = pyarrow.fs.FileSystem.from_uri(path)
        return found
    return pyarrow.fs.LocalFileSystem(), str(Path(path).expanduser().absolute())


def _glob(filesystem: pyarrow.fs.FileSystem, pattern: str) -> list[str]:
    fixed = pattern[: min((pattern.find(s) for s in "*?" if s in pattern), default=len(pattern))]
    base = fixed.rsplit("/", 1)[0] or "/"
    recursive = "/" in pattern[len(base) + 1 :]
    infos = filesystem.get_file_info(pyarrow.fs.FileSelector(base, recursive=recursive))
    # Only `*` and `?` are special; a bracket is a part of a name.
    plain = pattern.replace("[", "[[]")
    return [info.path for info in infos if info.is_file and fnmatchcase(info.path, plain)]


def read_rows(path: str) -> Iterator[tuple[Where, dict[str, Any]]]:
    """Stream the rows of one file of `list_files`: memory does not grow with the file.

    Raises InputError that names the row for bytes that are not UTF-8, invalid JSON or a short CSV
    line.
    """
    return read_piece(Piece(path))


def read_piece(piece: Piece) -> Iterator[tuple[Where, dict[str, Any]]]:
    """Stream the rows of a piece as `read_rows` does those of a file."""
    path = piece.file
    if path.startswith("hf://"):
        yield from _read_hub(path)
        return
    filesystem, name = _filesystem(path)
    try:
        if name.endswith(".parquet"):
            yield from _read_parquet(filesystem, name, piece)
        elif name.endswith(".csv"):
            yield from _read_csv(name, _lines(filesystem, name, piece))
        else:
            yield from _read_jsonl(name, _lines(filesystem, name, piece), piece.lines)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({type(error).__name__})") from None


def cut(file: str, size: int) -> list[Piece]:
    """Cut a large file into pieces of about `size` bytes: JSONL at the ends of lines, Parquet
    between its row groups; other files are one piece. Of JSONL, `lines` and `rows` have to be
    counted (`count_rows`, `numbered`)."""
    if file.startswith("hf://") or file.endswith(".csv"):
        return [Piece(file)]
    filesystem, name = _filesystem(file)
    try:
        length = filesystem.get_file_info(name).size or 0
        if length <= size:
            return [Piece(file)]
        if name.endswith(".parquet"):
            return list(_cut_parquet(filesystem, name, file, size))
    except (OSError, pyarrow.ArrowException):
        return [Piece(file)]  # whoever reads it says what is wrong with it
    return [Piece(file, begin, min(begin + size, length)) for begin in range(0, length, size)]


def _cut_parquet(
    filesystem: pyarrow.fs.FileSystem, name: str, file: str, size: int
) -> Iterator[Piece]:
    with pyarrow.parquet.ParquetFile(name, filesystem=filesystem) as parquet:
        metadata = parquet.metadata
    begin, taken, rows, before = 0, 0, 0, 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        taken += group.total_byte_size
        rows += group.num_rows
        if taken >= size or number == metadata.num_row_groups - 1:
            yield Piece(file, begin, number + 1, rows=before)
            begin, taken, before = number + 1, 0, rows


def count_rows(piece: Piece) -> tuple[int, int]:
    """Return the lines and the rows of a piece of JSONL."""
    filesystem, name = _filesystem(piece.file)
    lines = rows = 0
    try:
        for line in _lines(filesystem, name, piece):
            # The rule of `_read_jsonl`; most lines need not be decoded for it.
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


def _lines(filesystem: pyarrow.fs.FileSystem, name: str, piece: Piece) -> Iterator[bytes]:
    if piece.end is None:
        with filesystem.open_input_stream(name) as stream:
            yield from io.BufferedReader(stream)
        return
    with filesystem.open_input_file(name) as stream:
        at = max(0, piece.begin - 1)
        stream.seek(at)
        lines = io.BufferedReader(stream, READ_BYTES)
        if piece.begin:
            at += len(lines.readline())  # the end of a line that began before, or just its "\n"
        while at < piece.end and (line := lines.readline()):
            at += len(line)
            yield line


def text_of(row: dict[str, Any], column: str, where: Where) -> str:
    """Return a row's text, with question marks for lone surrogates, which no model reads. Raises
    InputError that names the row where the column holds no text."""
    value = row.get(column)
    if not isinstance(value, str):
        raise InputError(f"{where}: no text in column '{column}'")
    return valid_unicode(value)


def file_digests(
    path: str, on_share: Callable[[float], None] = lambda share: None, every: float = 1.0
) -> list[bytes]:
    """Return the SHA-256 of each file that `path` names, in order, or an `hf://` name itself. They
    are as private as the files: whoever can guess all records could confirm the guess.

    Several files are read at once, each from its beginning to its end; `on_share` is called `every`
    so many seconds with the share of the files that is read. Nothing that an earlier call found is
    used: a file may change and keep its size and its time of change, and both promises that a
    digest keeps are about privacy (docs/privacy.md, section 6.2).
    """
    files = [_HashedFile(file) for file in list_files(path)]
    pool = ThreadPoolExecutor(READERS)
    try:
        digests = [pool.submit(file.digest) for file in files]
        while wait(digests, timeout=every).not_done:
            on_share(sum(file.share for file in files) / len(files))
        return [digest.result() for digest in digests]
    finally:
        for file in files:
            file.stopped = True
        pool.shutdown(cancel_futures=True)


class _HashedFile:
    """A `_HashedFile` is hashed in one thread, and looked at and stopped in another."""

    def __init__(self, file: str) -> None:
        self.file, self.stopped = file, False
        self._size, self._read = 1, 0

    @property
    def share(self) -> float:
        return min(1.0, self._read / self._size)

    def digest(self) -> bytes:
        if self.file.startswith("hf://"):
            return self.file.encode()
        filesystem, name = _filesystem(self.file)
        sha256, buffer = hashlib.sha256(), memoryview(bytearray(READ_BYTES))
        try:
            self._size = filesystem.get_file_info(name).size or 1
            with filesystem.open_input_stream(name) as stream:
                while not self.stopped and (found := stream.readinto(buffer)):
                    sha256.update(buffer[:found])
                    self._read += found
        except OSError as error:
            raise InputError(f"{self.file}: cannot be read ({type(error).__name__})") from None
        return sha256.digest()


def fingerprint(digests: Iterable[bytes]) -> str:
    """Return the SHA-256 over the digests of all files, which changes where one of them does."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _decoded(name: str, lines: Iterable[bytes], before: int = 0) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(lines, start=before + 1):
        try:
            yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise InputError(f"{Where(name, number)}: the bytes are not valid UTF-8") from None


def _read_jsonl(
    name: str, lines: Iterable[bytes], before: int
) -> Iterator[tuple[Where, dict[str, Any]]]:
    for number, line in _decoded(name, lines, before):
        if not line.strip():
            continue
        where = Where(name, number)
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # a number of 5,000 digits is a ValueError
            raise InputError(f"{where}: not valid JSON (one object a line)") from None
        if not isinstance(row, dict):
            raise InputError(f"{where}: not a JSON object")
        yield where, row


def _read_csv(name: str, lines: Iterable[bytes]) -> Iterator[tuple[Where, dict[str, Any]]]:
    csv.field_size_limit(2**31 - 1)
    reader = csv.DictReader((line for _, line in _decoded(name, lines)), strict=True)
    number = 0
    try:
        if len(set(header := reader.fieldnames or ())) < len(header):
            raise InputError(f"{name.rsplit('/', 1)[-1]}: the header names a column twice")
        for number, row in enumerate(reader, start=1):
            if None in row or None in row.values():
                raise InputError(f"{Where(name, number)}: not as many fields as the header has")
            yield Where(name, number), row
    except csv.Error:
        raise InputError(f"{Where(name, number + 1)}: not valid CSV") from None


def _read_parquet(
    filesystem: pyarrow.fs.FileSystem, name: str, piece: Piece
) -> Iterator[tuple[Where, dict[str, Any]]]:
    number = piece.rows
    try:
        with pyarrow.parquet.ParquetFile(name, filesystem=filesystem) as file:
            groups = None if piece.end is None else list(range(piece.begin, piece.end))
            for batch in file.iter_batches(batch_size=1024, row_groups=groups):
                for row in batch.to_pylist():
                    number += 1
                    yield Where(name, number), row
    except (pyarrow.ArrowException, ValueError, OverflowError, TypeError) as error:
        kind = type(error).__name__
        raise InputError(f"{Where(name, number + 1)}: not a valid Parquet file ({kind})") from None


def _read_hub(path: str) -> Iterator[tuple[Where, dict[str, Any]]]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise InputError("hf:// needs the package `datasets`") from None
    name, _, split = path.removeprefix("hf://").partition("#")
    rows = load_dataset(name, split=split or "train", streaming=True)
    for number, row in enumerate(rows, start=1):
        yield Where(path, number), row
