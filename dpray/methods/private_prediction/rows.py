"""The rows of a file are validated and labelled; each joins one disjoint batch, or any number of
Poisson batches, and is put into a prompt there.

Workers that read import this module, and need neither the release nor the accountant for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

from dpray.config.config import DataConfig
from dpray.engines.base import Engine
from dpray.engines.text import TextCodec
from dpray.io.formats import Piece
from dpray.mechanisms.batches import HashPartition, PoissonBatches, content_rank
from dpray.methods.private_prediction.prompts import PromptTemplate
from dpray.types import InputError
from dpray.workers.rows import Row, TextOf, place, read_records

ROWS = pa.schema(
    [("label", pa.string()), ("text", pa.string()), ("unit", pa.string()), ("rank", pa.int64())]
)


def placeholder() -> Row:
    """Return the row that every batch has once, whatever the data holds, so that empty batches are
    decoded too. It has None for its `text`."""
    return {"label": "", "text": None, "unit": "", "rank": 0}


def private_rows(
    piece: Piece, data: DataConfig, text_of: TextOf | None, by_place: bool
) -> Iterator[Row]:
    """Yield the rows of a file or a piece of one; errors and `text_of` as in `read_records`. With
    `by_place`, a record that is its own unit is named by its place in the whole file, and not by
    its content."""
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


def bound_copies(rows: Iterable[Row], most: int) -> Iterator[Row]:
    """Yield at most `most` rows of each record, and all place-holders.

    One more copy adds at most one row and takes none away, so a record still moves a batch by one
    row. All copies of a text have one batch, which takes the longer the more they are.
    """
    seen: Counter[str] = Counter()
    for row in rows:
        if row["text"] is not None:
            seen[row["unit"]] += 1
            if seen[row["unit"]] > most:
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


def shown_examples(
    engine: Engine | TextCodec, template: PromptTemplate, label: str, batch: str, room: int
) -> Sequence[str]:
    """Return the public texts that the prompts of a batch show: fewer than were drawn if the
    prompt would take more than half of `room` without its private text."""
    examples = template.examples(label, batch)
    while examples and 2 * len(frame(engine, template, label, examples)) > room:
        examples.pop()
    return examples


def encode_private(
    engine: Engine,
    template: PromptTemplate,
    text: str,
    label: str,
    examples: Sequence[str],
    room: int,
) -> tuple[int, ...]:
    """Return a private prompt's tokens, its text cut so that they are at most `room`: a rule on
    this text alone."""
    most = max(room - len(frame(engine, template, label, examples)), 0)
    while True:
        prompt = template.private_prompt(engine.truncate(text, most), label, examples)
        tokens = engine.encode(prompt)
        if len(tokens) <= room:
            return tokens
        if most == 0:
            raise InputError(
                "method.template: the prompt leaves no room in the model's context for a text "
                "of method.max_tokens"
            )
        most -= min(most, max(len(tokens) - room, 8))


def frame(
    engine: Engine | TextCodec, template: PromptTemplate, label: str, examples: Sequence[str]
) -> tuple[int, ...]:
    """Return a private prompt's tokens without its text."""
    return engine.encode(template.private_prompt("", label, examples))
