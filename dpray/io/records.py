"""Rows are read from files of many kinds, local or in a cloud, whole or in parts.

Errors name the file and the row, never its content.
"""

from __future__ import annotations

import io
import lzma
import shutil
import struct
import zipfile
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from tempfile import TemporaryFile
from typing import Any, TypeAlias, assert_never

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet

from dpray.io.columns import column_of, dotted_names, listed_names, varied_objects
from dpray.io.content import FIRST_BYTES, check_content
from dpray.io.csv_files import last_row as last_csv_row
from dpray.io.csv_files import open_csv, read_csv, titles_above
from dpray.io.file_list import READ_BYTES, filesystem_of
from dpray.io.formats import (
    AS_RECOGNISED,
    ONE_TEXT,
    Content,
    FileFormat,
    FilePart,
    FileRow,
    Scanned,
    Where,
    base_name,
    folder_columns,
    kind_of,
    row_of,
    without_compression,
)
from dpray.io.hub import check_dataset
from dpray.io.mails import MAIL_COLUMNS, read_eml, read_mbox
from dpray.io.sheets import read_sheet, sheet_columns
from dpray.io.text_files import (
    LONGEST_ROW,
    START,
    UTF_8,
    encoding_of,
    folder_label,
    is_array,
    json_lines,
    read_json,
    read_txt,
)
from dpray.types import InputError

UNPACKED, TIMES = 1 << 30, 200
"""A compressed file may have this many bytes when it is unpacked, or this many times its own size;
texts rarely shrink to a twentieth, but a few MB may unpack to more than a disk holds."""

TAIL_BYTES = 1 << 16
"""Bytes at the end of a file of CSV that tell its last row."""

LOOKED_THROUGH = 256 << 20
"""A compressed file of CSV is unpacked for its last row if it has no more bytes than this."""

COMPARED = 20
"""The first rows of a file whose nested keys are compared."""
Stream: TypeAlias = pa.NativeFile
"""A file as pyarrow opens it, or one of Python, which has the same methods."""

IN_ANY_ORDER = ("parquet", "arrow", "xlsx")
"""The kinds of which a reader goes back and forth in the file."""

ROWS_AT_ONCE = 1024

ARROW_FILE = b"ARROW1"
"""An Arrow file that can be read in any order begins so; a stream of Arrow, as `save_to_disk`
writes it, does not."""

BROKEN = (pa.ArrowException, ValueError, OverflowError, TypeError)

CORRUPT = (
    OSError, EOFError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, RuntimeError, struct.error,
    LookupError, *BROKEN,
)  # fmt: skip
"""A file that cannot be read raises one of these: `zipfile` a RuntimeError for what is encrypted,
and a NotImplementedError, which is one too, for a compression that it does not know. It reads
places and lengths from the file and trusts them, and Arrow refuses a place before the beginning."""


def read_rows(path: str, form: FileFormat = AS_RECOGNISED) -> Iterator[tuple[Where, FileRow]]:
    """Stream the rows of one file of `list_files`; memory grows with the file for a JSON array
    only. Raises InputError that names the row for bytes that are not in the encoding, invalid JSON
    or a short CSV line."""
    return read_part(FilePart(path, format=form))


def read_part(part: FilePart) -> Iterator[tuple[Where, FileRow]]:
    """Stream the rows of a part, as `read_rows` streams a file's."""
    for where, row in scan_part(part):
        if isinstance(row, InputError):
            raise row
        yield where, row


def scan_part(part: FilePart) -> Scanned:
    """Stream the rows of a part, with the columns that its folders name. A bad row comes as its
    error, and the rows after it follow if the file can be read on. Raises InputError for a file
    that cannot be read at all."""
    named = folder_columns(part.file)
    for where, row in _with_varied(_scanned(part)):
        yield where, row if isinstance(row, InputError) or not named else named | row


def last_row(part: FilePart) -> tuple[Where, FileRow | InputError] | None:
    """Return the last row of a file of CSV, which may be a total, by its last bytes; None for other
    files, for compressed ones of more than `LOOKED_THROUGH` bytes, and if the bytes do not tell it.
    Raises InputError."""
    file, form = part.file, part.format
    if kind_of(file) not in ("csv", "zip"):
        return None
    with open_content(file) as (kind, stream):
        if kind != "csv" or (tail := _last_bytes(stream)) is None:
            return None
    if not tail:
        return next(iter(deque(scan_part(part), maxlen=1)), None)
    with open_content(file) as (_, stream):
        buffered = io.BufferedReader(stream, READ_BYTES)
        start = buffered.peek(4)[:4]
        opened = open_csv(file, buffered, form)
        found = last_csv_row(file, start, tail, opened, form, part.reads)
    if found is None or isinstance(found[1], InputError):
        return found
    return found[0], folder_columns(file) | found[1]


def _last_bytes(stream: Any) -> bytes | None:
    """Return the last bytes of a file, from a multiple of 4 on; none of a file that is no longer
    than these, and None for one that is too long to be unpacked for them."""
    if not isinstance(stream, _Unpacked):
        size = stream.size()
        begin = (size - TAIL_BYTES) // 4 * 4
        return stream.read_at(size - begin, begin) if size > TAIL_BYTES else b""
    tail, size = b"", 0
    while found := stream.read(READ_BYTES):
        size += len(found)
        if size > LOOKED_THROUGH:
            return None
        tail = (tail + found)[-TAIL_BYTES:]
    return tail[-size % 4 :] if size > TAIL_BYTES else b""


def _with_varied(rows: Scanned) -> Scanned:
    """Note in the places of a file's first rows which nested objects have other keys in each."""
    first = list(islice(rows, 1))
    if first and first[0][0].row == 1 and _is_nested(first[0][1]):
        first += islice(rows, COMPARED - 1)
        varied = varied_objects([row for _, row in first])
        first = [(replace(where, varied=varied), row) for where, row in first]
    yield from first
    yield from rows


def _is_nested(row: FileRow | InputError) -> bool:
    return isinstance(row, dict) and any(isinstance(v, Mapping | list) for v in row.values())


def _scanned(part: FilePart) -> Scanned:
    if kind_of(part.file) == "hub":
        yield from _read_hub(part.file)
        return
    with open_content(part.file) as (kind, stream):
        if kind not in IN_ANY_ORDER or not _is_empty(stream):
            yield from _rows_of(part, kind, stream)


def _rows_of(part: FilePart, kind: Content, stream: Stream) -> Scanned:
    file, form, buffered = part.file, part.format, partial(io.BufferedReader, stream, READ_BYTES)
    match kind:
        case "parquet":
            rows = _numbered(part, _parquet_batches(stream, part), "Parquet")
        case "arrow":
            rows = _numbered(part, _arrow_batches(stream, part), "Arrow")
        case "xlsx":
            rows = read_sheet(file, stream, form)
        case "csv":
            rows = read_csv(file, buffered(), form, reads=part.reads)
        case "json" if part.end is not None:
            lines = (line.decode("utf-8", "surrogateescape") for line in _lines(part, stream))
            rows = json_lines(file, lines, UTF_8, form, part.lines)
        case "json":
            rows = read_json(file, buffered(), form)
        case "txt":
            rows = read_txt(file, buffered(), form)
        case "eml":
            rows = read_eml(file, buffered(), form)
        case "mbox":
            rows = read_mbox(file, buffered(), form)
        case _:
            assert_never(kind)
    return rows


def _parquet_batches(stream: Stream, part: FilePart) -> Iterator[pa.RecordBatch]:
    with pyarrow.parquet.ParquetFile(stream) as file:
        groups = None if part.end is None else list(range(part.begin, part.end))
        columns = None
        if file.metadata.num_rows:
            columns = _fields_read(file.schema_arrow, part)
        yield from file.iter_batches(batch_size=ROWS_AT_ONCE, row_groups=groups, columns=columns)


def _arrow_batches(stream: Stream, part: FilePart) -> Iterator[pa.RecordBatch]:
    """Yield batches that are validated: Arrow takes a file's offsets as they stand, and wrong ones
    would read beyond the file's memory, or end the process."""
    with _open_arrow(stream) as file:
        is_file = isinstance(file, pa.ipc.RecordBatchFileReader)
        numbers = range(file.num_record_batches) if is_file else ()
        for whole in map(file.get_batch, numbers) if is_file else file:
            batch = whole.select(_columns_read(whole.schema, part)) if whole.num_rows else whole
            batch.validate(full=True)
            yield batch


def _columns_read(schema: pa.Schema, part: FilePart) -> list[str]:
    """Return the columns of a file that are read. Raises InputError, as a row would, for a column
    that is missing or named twice."""
    row = folder_columns(part.file) | row_of([(each.name, _shape(each.type)) for each in schema])
    for name in sorted(part.columns or ()):
        column_of(row, name, Where(part.file, part.rows + 1))
    return [name for name in schema.names if part.reads(name) and schema.names.count(name) == 1]


def _fields_read(schema: pa.Schema, part: FilePart) -> list[str]:
    """Return the columns, of objects only the fields that a dotted name leads to."""
    columns = _columns_read(schema, part)
    named = part.columns or frozenset(columns)
    found = [name for name in columns if name in named]
    for name in named - {*schema.names}:
        first, *parts = name.split(".")
        if first in columns and first not in named:
            kind, path = schema.field(first).type, [first]
            while parts and pa.types.is_struct(kind):
                kind = kind.field(parts[0]).type
                path.append(parts.pop(0))
            found.append(".".join(path))
    return found


def _shape(kind: pa.DataType) -> FileRow | None:
    """Return the nested names of a type, None for one without."""
    if not pa.types.is_struct(kind):
        return None
    return row_of([(each.name, _shape(each.type)) for each in kind])


def _open_arrow(stream: Stream) -> pa.RecordBatchReader:
    """Open an Arrow file or an Arrow stream, Feather too."""
    is_file = stream.read(len(ARROW_FILE)) == ARROW_FILE
    stream.seek(0)
    return pa.ipc.open_file(stream) if is_file else pa.ipc.open_stream(stream)


def _is_empty(stream: Stream) -> bool:
    """Return whether a file that can be read in any order has no bytes: programs that write in
    parts leave such a file for a part without rows."""
    is_empty = not stream.read(1)
    stream.seek(0)
    return is_empty


def _numbered(part: FilePart, batches: Iterable[pa.RecordBatch], kind: str) -> Scanned:
    number = part.rows
    try:
        for batch in batches:
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                for row in _plain_rows(batch.slice(start, ROWS_AT_ONCE)):
                    number += 1
                    where = Where(part.file, number)
                    problem = f"{where}: {row}"
                    yield where, InputError(problem) if isinstance(row, str) else row
    except BROKEN as error:
        where = Where(part.file, number + 1)
        why = f"not a valid {kind} file ({type(error).__name__})"
        yield where, InputError(f"{where}: {why}")


def _plain_rows(batch: pa.RecordBatch) -> Iterator[FileRow | str]:
    """Yield the rows as Python values, and in place of a row with a value that Python does not
    have, such as a day of the year 10000, what is wrong with it."""
    try:
        yield from batch.to_pylist()
    except BROKEN:
        for number in range(batch.num_rows):
            yield _plain_row(batch.slice(number, 1))


def _plain_row(batch: pa.RecordBatch) -> FileRow | str:
    row = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            [row[name]] = column.to_pylist()
        except BROKEN as error:
            return f"column '{name}' has a value that cannot be read ({type(error).__name__})"
    return row


@contextmanager
def open_content(file: str) -> Iterator[tuple[Content, Stream]]:
    """Open a file and undo its compression: yield the kind of its content, and its bytes. Those of
    `IN_ANY_ORDER` can be: from a copy without a name if they are compressed. Raises InputError for
    a file that cannot be read, a `.zip` that is not of one file, and bytes of another kind than the
    name says; an error of reading in the block becomes an InputError without its words."""
    with _readable(file), ExitStack() as stack:
        filesystem, name = filesystem_of(file)
        kind, compression = kind_of(name), without_compression(name)[1]
        with filesystem.open_input_stream(name, compression=None) as raw:
            check_content(file, raw.read(FIRST_BYTES), compression or kind)
        if compression is None:
            stream = filesystem.open_input_file(name)
        elif compression == "zip":
            outer = stack.enter_context(filesystem.open_input_file(name))
            archive = stack.enter_context(zipfile.ZipFile(outer))
            inner = _only_member(archive, file)
            kind, stream = kind_of(inner), archive.open(inner)
        else:
            stream = filesystem.open_input_stream(name, compression=compression)
        stack.enter_context(stream)
        if kind is None or kind == "zip" or kind == "hub":
            raise InputError(f"{base_name(file)}: a kind of file that is not read")
        if compression is not None:
            stream = _Unpacked(file, stream, filesystem.get_file_info(name).size or 0)
        if kind in IN_ANY_ORDER and compression is not None:
            copy = stack.enter_context(TemporaryFile())
            shutil.copyfileobj(stream, copy, READ_BYTES)
            copy.seek(0)
            stream = copy
        yield kind, stream


class _Unpacked(io.RawIOBase):
    """The bytes of a compressed file of `size` bytes. Reading raises InputError if there are too
    many of them."""

    def __init__(self, file: str, stream: Stream, size: int) -> None:
        self._file, self._stream = file, stream
        self._left = max(UNPACKED, TIMES * size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        found: int = self._stream.readinto(buffer)
        self._left -= found
        if self._left < 0:
            name = base_name(self._file)
            raise InputError(f"{name}: unpacks to more than {TIMES} times its size; unpack it")
        return found


def _only_member(archive: zipfile.ZipFile, file: str) -> str:
    """Return the name of the one file in a `.zip`; what a Mac adds does not count."""
    infos = [info for info in archive.infolist() if not info.is_dir()]
    infos = [info for info in infos if not info.filename.startswith("__MACOSX/")]
    if len(infos) != 1:
        raise InputError(f"{base_name(file)}: holds {len(infos)} files; a .zip of one is read")
    if (kind := kind_of(infos[0].filename)) in ONE_TEXT:
        raise InputError(f"{base_name(file)}: holds a .{kind} file, which has no folder; unpack it")
    if infos[0].flag_bits & 1 or kind in (None, "zip", "xlsx"):
        raise InputError(f"{base_name(file)}: is encrypted, or of a kind that is not read")
    return infos[0].filename


@contextmanager
def _readable(file: str) -> Iterator[None]:
    try:
        yield
    except CORRUPT as error:
        if isinstance(error, UnicodeError):
            why = "the bytes are not valid in the file's encoding"
            raise InputError(f"{base_name(file)}: {why}") from None
        if without_compression(file)[1] is not None:
            ending = file.rsplit(".", 1)[-1].lower()
            why = f"cannot be read, or is not a whole .{ending} file"
            raise InputError(f"{file}: {why}") from None
        raise InputError(f"{file}: cannot be read ({type(error).__name__})") from None


@dataclass(frozen=True)
class Header:
    """The columns of a file, and the delimiter that CSV is read with. JSON has the columns of its
    first object, with dotted names for nested values. If there is a `hint`, the columns may be data
    and are not shown."""

    columns: Sequence[str]
    delimiter: str | None = None
    hint: str = ""

    def __str__(self) -> str:
        return self.hint or f"there are: {listed_names(self.columns)}"


def read_file_header(file: str, form: FileFormat = AS_RECOGNISED) -> Header:
    """Read a file's header: of CSV the first line, of Parquet and Arrow the schema, of JSON the
    names in the first object; no row's values are kept. Raises InputError."""
    if kind_of(file) == "hub":
        _, row = next(read_rows(file), (None, {}))
        return Header(dotted_names(row))
    with open_content(file) as (kind, stream):
        if kind in IN_ANY_ORDER and _is_empty(stream):
            return Header([*folder_columns(file)])
        header = _header_of(file, kind, stream, form)
    named = [name for name in folder_columns(file) if name not in header.columns]
    return replace(header, columns=[*header.columns, *named])


def _header_of(file: str, kind: Content, stream: Stream, form: FileFormat) -> Header:
    buffered = partial(io.BufferedReader, stream, READ_BYTES)
    match kind:
        case "parquet":
            with pyarrow.parquet.ParquetFile(stream) as parquet:
                header = Header(_names_in(parquet.schema_arrow))
        case "arrow":
            with _open_arrow(stream) as arrow:
                header = Header(_names_in(arrow.schema))
        case "xlsx":
            header = Header(sheet_columns(file, stream, form))
        case "csv":
            opened = open_csv(file, buffered(), form)
            header = Header(opened.columns, opened.delimiter)
        case "json":
            header = _json_header(file, buffered(), form)
        case "txt":
            header = Header(["text", *folder_label(file)])
        case "eml":
            header = Header([*MAIL_COLUMNS, *folder_label(file)])
        case "mbox":
            header = Header(MAIL_COLUMNS)
        case _:
            assert_never(kind)
    return header


def is_empty_file(file: str) -> bool:
    """Return whether a file has no bytes, unpacked: a part without rows."""
    if kind_of(file) == "hub":
        return False
    with open_content(file) as (_, stream):
        return not stream.read(1)


def _names_in(schema: pa.Schema) -> list[str]:
    """Return the columns, and for lists of objects the dotted names of those in the first one."""
    names: list[str] = []
    for each in schema:
        kind = each.type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        inner = _shape(kind.value_type) if is_list else None
        names += [each.name, *(f"{each.name}.0.{name}" for name in inner or ())]
    return names


def _json_header(file: str, stream: io.BufferedReader, form: FileFormat) -> Header:
    rows = _with_varied(read_json(file, stream, form))
    where, row = next(rows, (Where(file, 1), {}))
    if isinstance(row, InputError):
        raise row
    return Header(dotted_names(row, varied=where.varied), hint=where.hint)


def titles_in(file: str, form: FileFormat) -> int:
    """Return the number of lines above the header of a file of CSV that seem to be titles; 0 if
    there are none, or if it cannot be read."""
    if kind_of(file) == "hub":
        return 0
    with suppress(InputError), open_content(file) as (kind, stream):
        buffered = io.BufferedReader(stream, READ_BYTES)
        return titles_above(file, buffered, form) if kind == "csv" else 0
    return 0


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


# Large files in parts: a row has the same number however its file is cut


def cut(whole: FilePart, size: int) -> list[FilePart]:
    """Cut a file of more than `size` bytes into parts: JSONL at the ends of lines, about every
    `size` bytes, Parquet into its row groups. Any other file is one part, as are compressed
    files, JSON arrays and files that are not UTF-8. `count_rows` and `numbered` then set the
    `lines` and `rows` before each part of JSONL."""
    kind, file = kind_of(whole.file), whole.file
    if kind not in ("json", "parquet") or without_compression(file)[1] is not None:
        return [whole]
    filesystem, name = filesystem_of(file)
    try:
        length = filesystem.get_file_info(name).size or 0
        if length <= size:
            return [whole]
        if kind == "parquet":
            return list(_cut_parquet(filesystem, name, whole))
        if not _has_lines(filesystem, name, whole.format):
            return [whole]
    except CORRUPT:
        return [whole]  # reading it says what is wrong
    return [
        replace(whole, begin=begin, end=min(begin + size, length))
        for begin in range(0, length, size)
    ]


def _has_lines(filesystem: pyarrow.fs.FileSystem, name: str, form: FileFormat) -> bool:
    """Return whether the bytes of a JSON file can be cut at the ends of lines."""
    with filesystem.open_input_stream(name, compression=None) as stream:
        start = stream.read(START)
    utf_8 = encoding_of(start, form.encoding) == UTF_8 and b"\0" not in start
    is_list = form.records is not None or is_array(start.decode("utf-8-sig", "replace"))
    return utf_8 and not is_list


def _cut_parquet(
    filesystem: pyarrow.fs.FileSystem, name: str, whole: FilePart
) -> Iterator[FilePart]:
    with pyarrow.parquet.ParquetFile(name, filesystem=filesystem) as parquet:
        metadata = parquet.metadata
    rows = 0
    for number in range(metadata.num_row_groups):
        yield replace(whole, begin=number, end=number + 1, rows=rows)
        rows += metadata.row_group(number).num_rows


def count_rows(part: FilePart) -> tuple[int, int]:
    """Return the lines and the rows of a part of JSONL."""
    lines = rows = 0
    with open_content(part.file) as (_, stream):
        for line in _lines(part, stream):
            # The rule of `json_lines`; most lines need not be decoded for it.
            rows += line.startswith(b"{") or bool(line.decode("utf-8-sig", "replace").strip())
            lines += 1
    return lines, rows


def numbered(parts: Iterable[FilePart], counts: Iterable[tuple[int, int]]) -> Iterator[FilePart]:
    """Yield the parts of one file, which come in order, with what comes before each."""
    lines = rows = 0
    for part, (more_lines, more_rows) in zip(parts, counts, strict=True):
        yield replace(part, lines=lines, rows=rows)
        lines, rows = lines + more_lines, rows + more_rows


def _lines(part: FilePart, stream: Stream) -> Iterator[bytes]:
    """Yield the lines of a part of JSONL that has an end."""
    end, at = part.end or 0, max(0, part.begin - 1)
    stream.seek(at)
    lines = io.BufferedReader(stream, READ_BYTES)
    # The end of a line that began before, or just its "\n".
    before = part.begin > 0
    while before and at < end and (rest := lines.readline(READ_BYTES)):
        at += len(rest)
        before = not rest.endswith(b"\n")
    # A character has at most four bytes: what is cut off here has more than LONGEST_ROW.
    while at < end and (line := lines.readline(4 * LONGEST_ROW + 1)):
        at += len(line)
        yield line
