"""A row without a text is an error or is left out; either way nobody else's batch moves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.config.config import DataConfig
from dpray.io.formats import FilePart
from dpray.io.records import count_rows, cut, numbered
from dpray.mechanisms.batches import HashPartition, PoissonBatches
from dpray.workers.gathering import BatchGathering
from dpray.workers.rows import bound_contributions, record_rows

EMPTY = st.sampled_from([None, "", " ", "\n\t", "\u00a0"])
TEXTS = st.sampled_from(["x", "y", " z "])
KEY = "0" * 64
POISSON = PoissonBatches({"": 40}, {"": 0.3})
DISJOINT = HashPartition({"": 7}, "0" * 32)


def batches_of(
    folder: Path, texts: list[str | None], data: DataConfig, by_place: bool
) -> list[tuple[str, list[str]]]:
    """The records that are left, in order, each with its batches."""
    path = folder / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"text": t, "who": i % 3}) + "\n" for i, t in enumerate(texts))
    )
    parts = cut(FilePart(str(path)), 60)
    if len(parts) > 1:
        parts = list(numbered(parts, map(count_rows, parts)))
    batches = POISSON if by_place else DISJOINT
    rows = [row for part in parts for row in record_rows(part, data, by_place=by_place)]
    if data.unit is not None:
        rows = bound_contributions(rows, data.max_records_per_unit)
    return [(row["text"], list(BatchGathering(batches, KEY, 1).joined(row))) for row in rows]


def data_of(path: Path | str = "x", **keys: Any) -> DataConfig:
    return DataConfig(path=str(path), public_size=40, **{"empty": "skip"} | keys)


@pytest.mark.parametrize("by_place", [True, False], ids=["poisson", "disjoint"])
@pytest.mark.parametrize("unit", [None, "who"])
@given(st.lists(TEXTS, min_size=1, max_size=8), st.data())
def test_neighbours_differ_in_one_units_batches(
    tmp_path_factory: pytest.TempPathFactory,
    by_place: bool,
    unit: str | None,
    texts: list[str | None],
    drawn: st.DataObject,
) -> None:
    """One data set has a text in a row, its neighbour has none there: as if it had not been given.
    All other records are in the same batches, though they come after it."""
    folder = tmp_path_factory.mktemp("rows")
    data = data_of(unit=unit, max_records_per_unit=1 if unit is None else 9)
    place = drawn.draw(st.integers(0, len(texts) - 1))
    for number in drawn.draw(st.lists(st.integers(0, len(texts) - 1), max_size=2)):
        if number != place:
            texts[number] = drawn.draw(EMPTY)
    without = [*texts[:place], drawn.draw(EMPTY), *texts[place + 1 :]]
    more = batches_of(folder, texts, data, by_place)
    fewer = batches_of(folder, without, data, by_place)
    assert len(more) == len(fewer) + 1 == sum(bool(text and text.strip()) for text in texts)
    left = list(more)
    for each in fewer:
        left.remove(each)
    assert [text for text, _ in left] == [texts[place]]


def test_a_skipped_row_moves_no_place(tmp_path: Path) -> None:
    """The units of DP-SGD go by their places, as the coins of Poisson batches do."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": null}\n{"text": "x"}\n\n{"text": " "}\n{"text": "x"}\n')
    rows = list(record_rows(FilePart(str(path), file_number=2), data_of(path), by_place=True))
    assert [row["unit"] for row in rows] == ["file 2, row 1", "file 2, row 3"]
