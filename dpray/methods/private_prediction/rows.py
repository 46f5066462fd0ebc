"""The rows of a file are validated and labelled; each joins one disjoint batch, or any number of
Poisson batches.

Workers that read import this module, and need neither the plan nor the release for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import pyarrow as pa

from dpray.config.config import DataConfig
from dpray.io.formats import Piece
from dpray.mechanisms.batches import HashPartition, PoissonBatches, content_rank
from dpray.workers.rows import Row, place, read_records

ROWS = pa.schema(
    [("label", pa.string()), ("text", pa.string()), ("unit", pa.string()), ("rank", pa.int64())]
)

MOST_COPIES = 4
"""The most copies of a text with its label that are used if a record is its own unit."""


def placeholder() -> Row:
    """Return the row that every batch has once, whatever the data holds, so that empty batches are
    decoded too. It has None for its `text`."""
    return {"label": "", "text": None, "unit": "", "rank": 0}


def private_rows(piece: Piece, data: DataConfig, by_place: bool) -> Iterator[Row]:
    """Yield the rows of a file or a piece of one; errors as in `read_records`. With
    `by_place`, a record that is its own unit is named by its place in the whole file, and not by
    its content."""
    for number, record in read_records(piece, data):
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


def bound_copies(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield at most `MOST_COPIES` rows of each record, and all place-holders.

    One more copy adds at most one row and takes none away, so a record still moves a batch by one
    row. All copies of a text have one batch, which takes the longer the more they are.
    """
    seen: Counter[str] = Counter()
    for row in rows:
        if row["text"] is not None:
            seen[row["unit"]] += 1
            if seen[row["unit"]] > MOST_COPIES:
                continue
        yield row


def group_rows(rows: Iterable[Row]) -> dict[str, list[str]]:
    """Return the texts of each batch. Every batch has to come with its one place-holder: without
    it, the rows are a part of a batch, and a part must not be decoded as if it were whole."""
    texts: dict[str, list[str]] = {}
    places: list[str] = []
    for row in rows:
        members = texts.setdefault(row["batch"], [])
        if row["text"] is None:
            places.append(row["batch"])
        else:
            members.append(row["text"])
    if sorted(places) != sorted(texts):
        raise RuntimeError("a batch did not arrive whole")
    return texts
