"""Writes the synthetic records of a table as `table.jsonl` and `table.parquet`.

Each row has the columns of the private data, those of its attributes and that of its label; a
conversation is a list of messages. Both files are made from released records only. Rows of a run
without noise are stamped `not_private`, as its records are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dpray.config.config import DataConfig
from dpray.io.files import sync, write_durably
from dpray.runs.folder import TABLES
from dpray.runs.privacy_report import TableCounts
from dpray.types import in_parts, valid_unicode

ROWS_IN_MEMORY = 10_000
"""Rows in memory at a time."""

NO_TYPE = (pa.ArrowException, OverflowError, OSError)
"""Arrow raises one of these for values without a common type, and for a type that is nested more
deeply than Parquet is read."""


def write_table(synthetic: Path, data: DataConfig) -> TableCounts:
    """Write the table of the records in the file `synthetic` next to it. Return the numbers of
    `rows`, and of records that are `left_out`: without a schema a text may not parse as a row."""
    table, parquet = map(synthetic.with_name, TABLES)
    counts = {"rows": 0, "left_out": 0}

    def lines() -> Iterator[str]:
        for record in _json_rows(synthetic):
            cells = data.columns_of(str(record["text"]))
            counts["left_out" if cells is None else "rows"] += 1
            if cells is not None:
                label = {} if data.label is None else {data.label: record["label"]}
                stamp = {"not_private": True} if record.get("not_private") else {}
                # Escapes in a text may be lone surrogates, which no file holds.
                row = label | {name: record[name] for name in data.attributes} | cells | stamp
                yield valid_unicode(json.dumps(row, ensure_ascii=False)) + "\n"

    write_durably(table, lines())
    _write_parquet(table, parquet)
    return TableCounts(**counts)


def _json_rows(file: Path) -> Iterator[dict[str, object]]:
    with open(file, encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _write_parquet(table: Path, target: Path) -> None:
    """Write the rows of JSON lines as Parquet. A column whose values have no common type in Arrow
    is written as JSON texts."""
    types: dict[str, pa.DataType] = {}
    as_json: set[str] = set()
    for part in in_parts(_json_rows(table), ROWS_IN_MEMORY):
        for name in part[0].keys() - as_json:
            try:
                types[name] = _common(types.get(name, pa.null()), [row[name] for row in part])
            except NO_TYPE:
                types[name] = pa.string()
                as_json.add(name)
    # A later part's type may not hold an earlier one's values: fractions, and large integers.
    for part in in_parts(_json_rows(table), ROWS_IN_MEMORY):
        for name in part[0].keys() - as_json:
            try:
                pa.array([row[name] for row in part], types[name])
            except NO_TYPE:
                types[name] = pa.string()
                as_json.add(name)
    # Keep the order of the columns.
    columns = next(_json_rows(table), {})
    schema = pa.schema([(name, types[name]) for name in columns])
    temporary = target.with_name(target.name + ".tmp")
    with pq.ParquetWriter(temporary, schema) as writer:
        for part in in_parts(_json_rows(table), ROWS_IN_MEMORY):
            for name in as_json:
                part = [row | {name: json.dumps(row[name], ensure_ascii=False)} for row in part]
            writer.write_table(pa.Table.from_pylist(part, schema=schema))
    sync(temporary)
    os.replace(temporary, target)
    sync(target.parent)


def _common(known: pa.DataType, values: list[object]) -> pa.DataType:
    """Return a type for the values and for those of type `known`. Raises one of NO_TYPE if they
    have no common type, or if Parquet cannot store it, such as an empty struct."""
    found = [pa.schema([("", each)]) for each in (known, pa.array(values).type)]
    common = pa.unify_schemas(found, promote_options="permissive")
    file = pa.BufferOutputStream()
    pq.write_table(common.empty_table(), file)
    pq.read_schema(pa.BufferReader(file.getvalue()))
    return common.field(0).type
