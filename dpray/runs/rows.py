"""A run's private records are validated, and limited per unit to the contribution bound."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dpray.config.config import Config, DataConfig
from dpray.io.records import Piece, Where, count_rows, cut, list_files, numbered, read_piece
from dpray.mechanisms.partition import content_id, content_rank
from dpray.types import InputError, Record, valid_unicode

if TYPE_CHECKING:
    import ray.data

Row = dict[str, Any]
"""A `Row` has at least the keys text, unit and rank; `rank` decides which of a unit's rows stay."""

RowsOf = Callable[[Piece], Iterator[Row]]
"""A `RowsOf` reads the rows of a file or a piece of one, and can be sent to another process."""

CHUNK = 1024
"""A block has at most this many rows."""

PIECE_BYTES = 128 << 20
"""A larger file is read by several tasks on Ray."""

TextOf = Callable[[dict[str, Any]], str]
"""A `TextOf` makes the text from a row's columns; it raises KeyError where one is missing, and
whatever else a template raises."""


def read_records(piece: Piece, data: DataConfig, text_of: TextOf | None = None) -> Iterator[Record]:
    """Yield the records of a file or a piece of one, in its order.

    Raises InputError naming the row for a missing column, a label outside the label set, a value
    that is no text or a text that is too long, and for a file without rows.
    """
    for where, row in _filled(piece):
        yield to_record(where, row, data, text_of)


def check_first_record(data: DataConfig, texts_from_columns: bool) -> None:
    """Raise InputError, as `read_records` does, where the first row of the first file is no record:
    most often a column is mistyped."""
    first = Piece(list_files(data.path)[0])
    next(read_records(first, data, (lambda row: "") if texts_from_columns else None))


def _filled(piece: Piece) -> Iterator[tuple[Where, dict[str, Any]]]:
    empty = piece.end is None  # a piece may lie in the midst of a line
    for where, row in read_piece(piece):
        empty = False
        yield where, row
    if empty:
        raise InputError(f"{piece.file.rsplit('/', 1)[-1]} holds no rows")


def record_rows(
    piece: Piece,
    data: DataConfig,
    column_values: Mapping[str, Collection[str]] | None = None,
) -> Iterator[Row]:
    """Yield the records of a file or a piece as rows; errors as in `read_records`.

    With `column_values`, the public values of other columns, a row has those columns too, as texts
    in `columns`; raises InputError naming the row for any other value.
    """
    for where, row in _filled(piece):
        record = to_record(where, row, data)
        rank = content_rank(record.text, record.label)
        found: Row = {
            "text": record.text,
            "label": record.label or "",
            "unit": record.unit_id,
            "rank": rank,
        }
        if column_values is not None:
            found["columns"] = _columns(where, row, column_values)
        yield found


def local_rows(data: DataConfig, rows_of: RowsOf) -> list[Row]:
    """Read the rows of all files into this process, at most as many of each unit as its bound."""
    files = list_files(data.path)
    pieces = (Piece(file, file_number=number) for number, file in enumerate(files))
    rows = (row for piece in pieces for row in rows_of(piece))
    return list(rows) if data.unit is None else bound_contributions(rows, data.max_records_per_unit)


def ray_rows(config: Config, rows_of: RowsOf, schema: pa.Schema) -> ray.data.Dataset:
    """Stream the rows of all files, at most as many of each unit as its bound; each piece of a file
    is one read task. Raises Ray's error for a file that cannot be read."""
    import ray.data

    data = config.data
    pieces = pieces_on_ray(list_files(data.path), PIECE_BYTES)
    read: Any = partial(_read, pieces=pieces, rows_of=rows_of, schema=schema)
    rows = ray.data.from_items(
        [{"piece": number} for number in range(len(pieces))], override_num_blocks=len(pieces)
    ).map_batches(read, batch_size=1)
    if data.unit is None:
        return rows
    bound: Any = partial(_bound, most=data.max_records_per_unit, schema=schema)
    partitions = max(1, min(200, data.public_size // 10_000))
    return rows.repartition(partitions, keys=["unit"]).map_batches(
        bound, batch_size=None, batch_format="pyarrow"
    )


def pieces_on_ray(files: Sequence[str], size: int) -> list[Piece]:
    """Return the files in pieces of about `size` bytes. The lines of JSONL that is cut are counted
    first, in tasks: a row has the same number however its file is cut."""
    import ray

    count: Any = ray.remote(count_rows)
    cuts = [
        [replace(piece, file_number=number) for piece in cut(file, size)]
        for number, file in enumerate(files)
    ]
    counts = [
        [count.remote(piece) for piece in pieces]
        if len(pieces) > 1 and not pieces[0].file.endswith(".parquet")
        else []
        for pieces in cuts
    ]
    return [
        piece
        for pieces, counted in zip(cuts, counts, strict=True)
        for piece in (numbered(pieces, ray.get(counted)) if counted else pieces)
    ]


def _read(
    numbers: dict[str, Any], pieces: Sequence[Piece], rows_of: RowsOf, schema: pa.Schema
) -> Iterator[pa.Table]:
    for number in numbers["piece"]:
        rows = rows_of(pieces[number])
        while chunk := list(islice(rows, CHUNK)):
            yield pa.Table.from_pylist(chunk, schema=schema)


def _bound(table: pa.Table, most: int, schema: pa.Schema) -> pa.Table:
    return pa.Table.from_pylist(bound_contributions(table.to_pylist(), most), schema=schema)


def bound_contributions(rows: Iterable[Row], most: int) -> list[Row]:
    """Return at most `most` rows of each unit, those of lowest rank; `rows` hold all rows of a
    unit."""
    by_unit: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_unit[row["unit"]].append(row)
    return [
        row
        for unit in by_unit.values()
        for row in sorted(unit, key=lambda row: (row["rank"], row["text"]))[:most]
    ]


def to_record(
    where: Where, row: Mapping[str, Any], data: DataConfig, text_of: TextOf | None = None
) -> Record:
    """Return one validated record; raises InputError naming the row."""
    text = _text(where, row, data, text_of)
    label = None
    if data.label is not None:
        label = _word(where, row, data.label)
        if label not in data.labels:
            raise InputError(f"{where}: the label is not one of data.labels")
    unit = content_id(text, label)
    if data.unit is not None:
        unit = _unit(where, row, data.unit)
        if unit != valid_unicode(unit):
            raise InputError(f"{where}: column '{data.unit}' is not valid Unicode")
    return Record(text, label, unit)


def _text(where: Where, row: Mapping[str, Any], data: DataConfig, text_of: TextOf | None) -> str:
    value = _column(where, row, data.text)
    if text_of is not None:
        try:
            value = text_of(dict(row))
        except KeyError:
            raise InputError(f"{where}: a column that the template needs is missing") from None
        except Exception as error:
            kind = type(error).__name__
            raise InputError(f"{where}: method.template: `private` fails ({kind})") from None
    if not isinstance(value, str):
        raise InputError(f"{where}: column '{data.text}' is not a text")
    if len(value) > data.max_characters:
        raise InputError(
            f"{where}: the text is longer than data.max_characters, {data.max_characters}"
        )
    return valid_unicode(value)


def _columns(
    where: Where, row: Mapping[str, Any], column_values: Mapping[str, Collection[str]]
) -> dict[str, str]:
    columns = {}
    for name, values in column_values.items():
        columns[name] = _word(where, row, name)
        if columns[name] not in values:
            raise InputError(f"{where}: the value of column '{name}' is not one of its public ones")
    return columns


def _word(where: Where, row: Mapping[str, Any], name: str) -> str:
    """Return a column's value as a name. An object has no name, because its parts have no order,
    nor has a list; and not-a-number is no value."""
    value = _column(where, row, name)
    if isinstance(value, Mapping | list | tuple) or value != value:
        raise InputError(f"{where}: column '{name}' holds no text and no number")
    return str(value)


def _unit(where: Where, row: Mapping[str, Any], name: str) -> str:
    """Return the name of a unit: 1 and 1.0 are one number, so one unit."""
    value = row.get(name)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return _word(where, row, name)


def _column(where: Where, row: Mapping[str, Any], name: str) -> Any:
    if (value := row.get(name)) is None:
        raise InputError(f"{where}: no column '{name}', or nothing in it")
    return value
