"""A run's private records are validated, and limited per unit to the contribution bound."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dpray.config.config import Config, DataConfig
from dpray.engines.base import EngineError
from dpray.extras import Late
from dpray.io.after import after
from dpray.io.columns import OTHER, column_of, is_empty, is_known, match_label, value_name
from dpray.io.file_list import file_digest, list_files
from dpray.io.formats import FilePart, Where, base_name, kind_of
from dpray.io.records import count_rows, cut, last_row, numbered, read_part
from dpray.io.units import unit_of
from dpray.mechanisms.batches import content_id, content_rank
from dpray.types import DprayError, InputError, Json, in_parts, is_interruption

if TYPE_CHECKING:
    import ray.data
else:
    ray = Late("ray")

Row = dict[str, Any]
"""Has at least the keys text, unit and rank; `rank` decides which of a unit's rows stay."""

ROW_SCHEMA = pa.schema(
    [("label", pa.string()), ("text", pa.string()), ("unit", pa.string()), ("rank", pa.int64())]
)

WITH_COLUMNS = ROW_SCHEMA.append(pa.field("columns", pa.map_(pa.string(), pa.string())))
"""The schema of rows whose other columns are read too."""

RowsOf = Callable[[FilePart], Iterator[Row]]
"""Reads the rows of a file or a part of one, and can be sent to another process."""

Tables = Callable[[Iterable[Row]], Iterator[pa.Table]]
"""Makes tables of rows, as `tables_of` does."""

ROWS_AT_ONCE = 1024
"""A block has at most this many rows."""

PART_BYTES = 128 << 20
"""A larger file is read by several tasks on Ray."""

MOST_TASKS = 1000
"""Many small files are read by this many tasks on Ray."""


def check_first_records(
    data: DataConfig, column_values: Mapping[str, Collection[str]] | None = None
) -> None:
    """Raise InputError, as `record_rows` does with these `column_values`, if the first row of a
    file or the last one of CSV is no record, or if no file has a row. A stray file is found so, a
    column that is mistyped, and a total below a table."""
    has_rows = False
    for part in data_files(data):
        try:
            for where, row in islice(read_part(part), 1):
                to_row(where, row, data, column_values)
                has_rows = True
        except InputError as error:
            if not has_rows:
                raise
            raise InputError(f"{error}; is it data, as the files before it are?") from None
        _check_last(part, data)
    if not has_rows:
        raise InputError(f"data.path: {data.path} holds no rows")


def _check_last(part: FilePart, data: DataConfig) -> None:
    if (last := last_row(part)) is None:
        return
    where, row = last
    try:
        if isinstance(row, InputError):
            raise row
        to_row(where, row, data)
    except InputError as error:
        hint = "" if "total" in str(error) else "; if the row is a total, remove it"
        raise InputError(f"{error}{hint}") from None


def data_files(data: DataConfig) -> list[FilePart]:
    """Return the files of `data.path`, each with its number, and with its digest if the run has
    one. Raises InputError if these are not as many files as were hashed."""
    files = list_files(data.path)
    digests = data.digests or [None] * len(files)
    if len(digests) != len(files):
        raise InputError(
            f"data.path: names {len(files)} files, and the run began with {len(digests)}; restore "
            "them, or choose another output.path"
        )
    return [
        FilePart(file, file_number=number, format=data.format, sha256=sha256, columns=data.columns)
        for number, (file, sha256) in enumerate(zip(files, digests, strict=True))
    ]


def _check_unchanged(part: FilePart) -> None:
    if part.sha256 is not None and file_digest(part.file) != part.sha256:
        raise InputError(
            f"data.path: {base_name(part.file)} has changed since the run began; restore it, or "
            "choose another output.path"
        )


def record_rows(
    part: FilePart,
    data: DataConfig,
    column_values: Mapping[str, Collection[str]] | None = None,
    by_place: bool = False,
) -> Iterator[Row]:
    """Yield the records of a file or a part of one as rows, in its order.

    A record that is its own unit is named by its content, or, with `by_place`, by the numbers of
    its file and of its row there, which depend on no other row's content.

    With `data.empty: skip`, a row whose text is empty is no record, and neither is one that
    `data.after` leaves out. Claim: whether it is one
    depends on that row only, and the rows are numbered before any is left out. So a data set
    without such a row, or with a text in it, has the same records otherwise, in the same batches:
    adding or removing a unit still adds or removes its own records only, and every sensitivity
    stays what it is. How many rows were left out is private, and is shown nowhere.

    After the last row the file is hashed. Nothing is drawn from rows before all are read, so
    nothing is drawn from a file that has changed since the run was charged.

    Raises InputError for a file that has changed, and InputError naming the row for
    a missing column, a label outside the label set, a value that is no text, or an empty text.
    """
    names = data.columns | {*(column_values or ())}
    rows = read_part(replace(part, columns=names))
    try:
        for number, (where, row) in enumerate(rows, start=part.rows):
            if (found := to_row(where, row, data, column_values)) is not None:
                if by_place and data.unit is None:
                    found["unit"] = f"file {part.file_number}, row {number}"
                yield found
    except InputError:
        _check_unchanged(part)  # whose error tells more
        raise
    _check_unchanged(part)


def to_row(
    where: Where,
    row: Mapping[str, object],
    data: DataConfig,
    column_values: Mapping[str, Collection[str]] | None = None,
) -> Row | None:
    """Return one validated record as a row, None for one that `data.after` leaves out, and for an
    empty text or another label that is skipped.

    With `column_values`, the public values of other columns, the row has those columns too, as
    texts in `columns`. An unknown value of an attribute is `OTHER` if that is a public one: a rule
    on that row only. Raises InputError naming the row, also for any other value.
    """
    if data.after is not None and not after(data.after).keeps(row, where):
        return None
    # Cut, not refused: no length of a text ends a run that is charged.
    text, label = data.text_of(row, where)[: data.max_characters], None
    if is_empty(text):
        if data.empty == "skip":
            return None
        raise InputError(f"{where}: the text is empty (data.empty: skip leaves such rows out)")
    if data.label is not None:
        value = column_of(row, data.label, where)
        if data.other_labels == "skip" and not is_known(value, data.label_names):
            return None
        label = match_label(value, data.label_names, data.label, where)
    found: Row = {
        "text": text,
        "label": label or "",
        "unit": content_id(text, label) if data.unit is None else unit_of(row, data.unit, where),
        "rank": content_rank(text, label),
    }
    if column_values is not None:
        found["columns"] = _public_values(where, row, data, column_values)
    return found


def local_rows(data: DataConfig, rows_of: RowsOf) -> list[Row]:
    """Read the rows of all files into this process, at most as many of each unit as its bound."""
    rows = chain.from_iterable(map(rows_of, data_files(data)))
    return list(rows) if data.unit is None else bound_contributions(rows, data.max_records_per_unit)


def tables_of(rows: Iterable[Row], schema: pa.Schema = ROW_SCHEMA) -> Iterator[pa.Table]:
    """Yield the rows in tables. The first one is empty: it has the schema, should there be no row.
    Ray cannot join blocks without one."""
    yield schema.empty_table()
    for part in in_parts(rows, ROWS_AT_ONCE):
        yield pa.Table.from_pylist(part, schema=schema)


def ray_rows(
    config: Config, rows_of: RowsOf, tables: Tables = tables_of, schema: pa.Schema = ROW_SCHEMA
) -> ray.data.Dataset:
    """Stream `tables` of the rows of all files, at most as many of each unit as its bound; a read
    task has a part of a large file, or many small files. `tables` gets the rows of one or more
    whole units at a time, all of a task together. The rows have this schema. Raises Ray's error for
    a file that cannot be read."""
    data = config.data
    parts = parts_on_ray(data_files(data), PART_BYTES)
    whole = tables if data.unit is None else partial(tables_of, schema=schema)
    read = partial(_read_tables, parts=parts, rows_of=rows_of, tables=whole)
    rows = ray.data.from_items(
        [{"part": number} for number in range(len(parts))],
        override_num_blocks=min(len(parts), MOST_TASKS),
    ).map_batches(read, batch_size=None)
    if data.unit is None:
        return rows
    bound = partial(_bound, most=data.max_records_per_unit, tables=tables)
    partitions = max(1, min(200, data.public_size // 10_000))
    return rows.repartition(partitions, keys=["unit"]).map_batches(
        bound, batch_size=None, batch_format="pyarrow"
    )


def parts_on_ray(files: Sequence[FilePart], size: int) -> list[FilePart]:
    """Return the files in parts of about `size` bytes. The lines of JSONL that is cut are counted
    first, in tasks: a row has the same number however its file is cut. Who reads a whole file
    hashes it; `check_cut_files` hashes those that are cut."""
    count = ray.remote(_count_lines)
    cuts = [
        [replace(part, sha256=None) for part in parts] if len(parts) > 1 else parts
        for parts in (cut(file, size) for file in files)
    ]
    counts = {
        number: [count.remote(part) for part in parts]
        for number, parts in enumerate(cuts)
        if len(parts) > 1 and kind_of(parts[0].file) == "json"
    }
    for number, counted in counts.items():
        cuts[number] = list(numbered(cuts[number], ray.get(counted)))
    return [part for parts in cuts for part in parts]


def check_cut_files(files: Sequence[FilePart], size: int = PART_BYTES) -> None:
    """Hash those of the files that `parts_on_ray` cuts, in tasks. Call it once all parts are read
    and before anything is drawn. Raises Ray's error for a file that has changed."""
    check = ray.remote(_check_unchanged)
    ray.get([check.remote(file) for file in files if len(cut(file, size)) > 1])


def _count_lines(part: FilePart) -> tuple[int, int]:
    with without_words():
        return count_rows(part)


def _read_tables(
    numbers: Json, parts: Sequence[FilePart], rows_of: RowsOf, tables: Tables
) -> Iterator[pa.Table]:
    with without_words():
        yield from tables(row for number in numbers["part"] for row in rows_of(parts[number]))


def _bound(table: pa.Table, most: int, tables: Tables) -> Iterator[pa.Table]:
    with without_words():
        yield from tables(bound_contributions(table.to_pylist(), most))


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


def _public_values(
    where: Where,
    row: Mapping[str, object],
    data: DataConfig,
    column_values: Mapping[str, Collection[str]],
) -> dict[str, str]:
    columns = {}
    for name, values in column_values.items():
        if name == data.label:
            columns[name] = match_label(column_of(row, name, where), data.label_names, name, where)
            continue
        value = column_of(row, name, where)
        # A list or an object has no name: Python may be unable to write a deep one as a text.
        is_nested = isinstance(value, Mapping | list | tuple)
        found = None if is_nested else value_name(value, values)
        if found not in values and name in data.attributes and OTHER in values:
            found = OTHER
        if found is None or found not in values:
            raise InputError(f"{where}: the value of column '{name}' is not one of its public ones")
        columns[name] = found
    return columns


class WorkerError(Exception):
    """A library's error in a worker, of which only the name is left.

    Ray keeps the text of an error that a task raised until the cluster ends, and its dashboard
    shows it to anyone with the cluster's token. A library's error may quote a record.
    """


@contextmanager
def without_words() -> Iterator[None]:
    """Raise an error of the system by its number and one of a library by its name only. Those of
    dpray pass: they quote no record.

    The loss of an actor that the worker called passes too, as a loss, after which its work is
    repeated. Only the ranks of a training call actors, those of Ray Train. These get the number of
    a step and the path of a checkpoint, so no record can end them, and a training pays for the
    steps that it makes again."""
    try:
        yield
    except (DprayError, EngineError):
        raise
    except ray.exceptions.RayActorError:
        raise ray.exceptions.RayActorError from None  # its words may be those of the lost one
    except OSError as error:
        number = error.errno or 0
        raise OSError(number, os.strerror(number)) from None
    except BaseException as error:
        if is_interruption(error):
            raise
        raise WorkerError(type(error).__name__) from None
