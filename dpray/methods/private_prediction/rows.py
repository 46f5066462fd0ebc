"""The rows of a file are validated, labelled and hashed into the rows of batches."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from dpray.config.config import DataConfig
from dpray.mechanisms.partition import HashPartition, content_id
from dpray.methods.private_prediction.prompts import PromptTemplate
from dpray.runs.rows import Row, read_records

ROWS = pa.schema(
    [("batch", pa.string()), ("text", pa.string()), ("unit", pa.string()), ("rank", pa.int64())]
)


def placeholder(batch_id: str) -> Row:
    """Return the one row that every batch has, whatever the data holds: with None for its `text`.
    Empty batches run too."""
    return {"batch": batch_id, "text": None, "unit": "", "rank": 0}


def batch_rows(
    file: str, data: DataConfig, template: PromptTemplate, partition: HashPartition
) -> Iterator[Row]:
    """Yield the rows of one file with their batches; errors as in `read_records`."""
    text_of = None if template.private is None else template.text_of
    for record in read_records(file, data, text_of):
        batch = partition.batch_id(record.label or "", record.unit_id)
        # Which records of a unit stay is decided by the unit's own records. 63 bits: Arrow's int64.
        rank = partition.keyed_hash(content_id(record.text, record.label)) >> 1
        yield {"batch": batch, "text": record.text, "unit": record.unit_id, "rank": rank}
