"""The rows of a file are validated and labelled; each joins one disjoint batch, or any number of
Poisson batches.

Workers that read import this module, and need neither the release nor the accountant for it."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from dpray.config.config import DataConfig
from dpray.io.formats import Piece
from dpray.mechanisms.batches import HashPartition, PoissonBatches, content_rank
from dpray.methods.private_prediction.prompts import PromptTemplate
from dpray.workers.rows import Row, place, read_records

ROWS = pa.schema(
    [("label", pa.string()), ("text", pa.string()), ("unit", pa.string()), ("rank", pa.int64())]
)


def placeholder() -> Row:
    """Return the row that every batch has once, whatever the data holds, so that empty batches are
    decoded too. It has None for its `text`."""
    return {"label": "", "text": None, "unit": "", "rank": 0}


def private_rows(
    piece: Piece, data: DataConfig, template: PromptTemplate, by_place: bool
) -> Iterator[Row]:
    """Yield the rows of a file or a piece of one; errors as in `read_records`. With `by_place`, a
    record that is its own unit is named by its place in the whole file, and not by its content."""
    text_of = template.text_of if template.record else None
    for number, record in read_records(piece, data, text_of):
        unit = record.unit_id
        if by_place and data.unit is None:
            unit = place(piece, number)
        rank = content_rank(record.text, record.label)
        yield {"label": record.label or "", "text": record.text, "unit": unit, "rank": rank}


def joined(batches: HashPartition | PoissonBatches, key: str, row: Row) -> Iterator[str]:
    """Yield the batches that a row's unit joins."""
    if isinstance(batches, HashPartition):
        return batches.joined(row["label"], row["unit"])
    return batches.joined(key, row["label"], row["unit"])
