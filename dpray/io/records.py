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
from dataclasses import dataclass
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
    if path.startswith("hf://"):
        yield from _read_hub(path)
        return
    filesystem, name = _filesystem(path)
    try:
        if name.endswith(".parquet"):
            yield from _read_parquet(filesystem, name)
            return
        with filesystem.open_input_stream(name) as stream:
            lines = io.BufferedReader(stream)
            yield from _read_csv(name, lines) if name.endswith(".csv") else _read_jsonl(name, lines)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({type(error).__name__})") from None


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


def _decoded(name: str, lines: io.BufferedReader) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(lines, start=1):
        try:
            yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise InputError(f"{Where(name, number)}: the bytes are not valid UTF-8") from None


def _read_jsonl(name: str, lines: io.BufferedReader) -> Iterator[tuple[Where, dict[str, Any]]]:
    for number, line in _decoded(name, lines):
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


def _read_csv(name: str, lines: io.BufferedReader) -> Iterator[tuple[Where, dict[str, Any]]]:
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
    filesystem: pyarrow.fs.FileSystem, name: str
) -> Iterator[tuple[Where, dict[str, Any]]]:
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(name, filesystem=filesystem) as file:
            for batch in file.iter_batches(batch_size=1024):
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
