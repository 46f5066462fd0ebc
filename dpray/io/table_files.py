"""Parquet and Arrow files are read in batches of rows."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from tempfile import TemporaryFile
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet

from dpray.io.formats import Piece, Scanned, Where
from dpray.types import InputError

ROWS_AT_ONCE = 1024
ARROW_FILE = b"ARROW1"
"""An Arrow file that can be read in any order begins so; a stream of Arrow, as `save_to_disk`
writes it, does not."""

BROKEN = (pa.ArrowException, ValueError, OverflowError, TypeError)


def read_parquet(name: str, source: Any, piece: Piece) -> Scanned:
    """Read the row groups of a piece; `source` is a file that can be read in any order."""

    def batches() -> Iterator[pa.RecordBatch]:
        with pyarrow.parquet.ParquetFile(source) as file:
            groups = None if piece.end is None else list(range(piece.begin, piece.end))
            yield from file.iter_batches(batch_size=ROWS_AT_ONCE, row_groups=groups)

    return _rows(name, batches(), piece.rows, "Parquet")


def read_arrow(name: str, source: Any) -> Scanned:
    """Read an Arrow file or stream, Feather too; `source` can be read in any order."""

    def batches() -> Iterator[pa.RecordBatch]:
        is_file = source.read(len(ARROW_FILE)) == ARROW_FILE
        source.seek(0)
        if is_file:
            with pa.ipc.open_file(source) as file:
                for number in range(file.num_record_batches):
                    yield file.get_batch(number)
        else:
            with pa.ipc.open_stream(source) as stream:
                yield from stream

    return _rows(name, batches(), 0, "Arrow")


def _rows(name: str, batches: Iterable[pa.RecordBatch], before: int, kind: str) -> Scanned:
    number = before
    try:
        for batch in batches:
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                for row in batch.slice(start, ROWS_AT_ONCE).to_pylist():
                    number += 1
                    yield Where(name, number), row
    except BROKEN as error:
        where = Where(name, number + 1)
        why = f"not a valid {kind} file ({type(error).__name__})"
        yield where, InputError(f"{where}: {why}")


def read_in_any_order(stream: IO[bytes]) -> IO[bytes]:
    """Copy a stream into a file without a name, which is gone once it is closed: what was
    compressed can then be read in any order."""
    copy = TemporaryFile()  # noqa: SIM115 (its reader closes it)
    shutil.copyfileobj(stream, copy, 1 << 20)
    copy.seek(0)
    return copy


def schema_names(source: Any, kind: str) -> list[str]:
    """Return the columns of a Parquet or an Arrow file, without its rows."""
    if kind == "parquet":
        with pyarrow.parquet.ParquetFile(source) as file:
            return list(file.schema_arrow.names)
    is_file = source.read(len(ARROW_FILE)) == ARROW_FILE
    source.seek(0)
    with pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source) as reader:
        return list(reader.schema.names)
