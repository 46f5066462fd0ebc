from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.config.config import DataConfig
from dpray.io.formats import FilePart
from dpray.io.records import count_rows, cut, numbered
from dpray.mechanisms.batches import HashPartition
from dpray.workers.gathering import PLACEHOLDER, batch_texts
from dpray.workers.rows import bound_contributions, local_rows, record_rows

DATA = DataConfig(path="x", label="label", labels=("a", "b"), public_size=40, max_characters=1000)
PARTITION = HashPartition({"a": 4, "b": 4}, "0" * 32)


def rows(path: Path, lines: list[Any], data: DataConfig = DATA) -> list[dict[str, Any]]:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = record_rows(FilePart(str(path)), data)
    return [
        row | {"batch": batch}
        for row in found
        for batch in PARTITION.joined(row["label"], row["unit"])
    ]


def test_a_records_batch_does_not_depend_on_order_or_on_other_records(tmp_path: Path) -> None:
    lines = [{"text": f"text {n}", "label": "ab"[n % 2]} for n in range(20)]
    forwards = {r["text"]: r["batch"] for r in rows(tmp_path / "x.jsonl", lines)}
    backwards = {r["text"]: r["batch"] for r in rows(tmp_path / "y.jsonl", lines[:0:-1])}
    assert backwards == {text: forwards[text] for text in backwards}
    assert {batch[0] for batch in forwards.values()} == {"0", "1"}


@pytest.mark.parametrize("length", [999, 1000, 1001, 10**6])
def test_a_text_of_any_length_is_a_record(tmp_path: Path, length: int) -> None:
    text = "é" * length
    found = rows(tmp_path / "x.jsonl", [{"text": text, "label": "a"}])
    assert [row["text"] for row in found] == [text[: DATA.max_characters]]


@pytest.mark.parametrize("size", [1, 30, 100, 10_000])
def test_a_records_place_does_not_depend_on_how_its_file_is_cut(tmp_path: Path, size: int) -> None:
    """By its place go the coins of Poisson batches, in every attempt and on any cluster."""
    path = tmp_path / "x.jsonl"
    lines = [json.dumps({"text": "the same", "label": "ab"[n % 2]}) for n in range(20)]
    path.write_text("\n\n".join(lines))

    def units(parts: list[FilePart]) -> list[str]:
        made = (record_rows(part, DATA, by_place=True) for part in parts)
        return [row["unit"] for rows in made for row in rows]

    parts = cut(FilePart(str(path), file_number=3), size)
    if len(parts) > 1:
        parts = list(numbered(parts, map(count_rows, parts)))
    whole = units([FilePart(str(path), file_number=3)])
    assert units(parts) == whole == [f"file 3, row {n}" for n in range(20)]


def test_a_records_place_stays_when_the_folder_of_its_file_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a job's working directory does, which has another name whenever the job is submitted."""
    data = DATA.model_copy(update={"path": "*.jsonl", "label": None})
    rows_of = partial(record_rows, data=data, by_place=True)
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    for name in ("x.jsonl", "y.jsonl"):
        (before / name).write_text('{"text": "the same"}\n' * 3)
    monkeypatch.chdir(before)
    units = [row["unit"] for row in local_rows(data, rows_of)]
    assert len(set(units)) == 6
    before.rename(after)
    monkeypatch.chdir(after)
    assert [row["unit"] for row in local_rows(data, rows_of)] == units


def test_lone_surrogates_become_text_a_tokenizer_takes(tmp_path: Path) -> None:
    assert rows(tmp_path / "x.jsonl", [{"text": "a\ud800b", "label": "a"}])[0]["text"] == "a?b"


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.text(max_size=3)), max_size=30),
    st.integers(1, 3),
)
def test_a_units_kept_rows_depend_on_its_own_rows_only(
    drawn: list[tuple[int, int, str]], most: int
) -> None:
    made = [{"unit": str(u), "rank": r, "text": t, "batch": "0/0"} for u, r, t in drawn]
    kept = bound_contributions(made, most)
    for unit in {row["unit"] for row in made}:
        alone = bound_contributions([row for row in made if row["unit"] == unit], most)
        assert [row for row in kept if row["unit"] == unit] == alone
        assert len(alone) <= most


def test_a_part_of_a_batch_is_refused() -> None:
    row = {"batch": "0/1", "text": "x", "unit": "u", "rank": 1}
    assert batch_texts([row, PLACEHOLDER | {"batch": "0/1"}, PLACEHOLDER | {"batch": "0/2"}]) == {
        "0/1": ["x"],
        "0/2": [],
    }
    for parts in ([row], [PLACEHOLDER | {"batch": "0/1"}] * 2):
        with pytest.raises(RuntimeError, match="whole"):
            batch_texts(parts)
