"""The table of a release, as JSON lines and as Parquet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpray.config.data import DataConfig
from dpray.runs import table
from dpray.runs.table import write_table

AB = DataConfig(path="x", text=("a", "b"), public_size=9)


def release(folder: Path, texts: list[str], label: Any = None) -> Path:
    file = folder / "synthetic.jsonl"
    rows = [{"text": text, "label": label, "tokens": 3} for text in texts]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def tables(folder: Path) -> tuple[list[dict[str, Any]], pa.Table]:
    # Of bytes: a text may hold other ends of lines.
    lines = (folder / "table.jsonl").read_bytes().splitlines()
    return [json.loads(line) for line in lines], pq.read_table(folder / "table.parquet")


def test_both_files_have_the_columns_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts of two rows whose types differ."""
    monkeypatch.setattr(table, "ROWS_IN_MEMORY", 2)
    data = DataConfig(
        path="x", text=("title", "film.year", "cast"), public_size=9, label="genre", labels=(7,)
    )
    years: list[Any] = [None, None, 1994, 2001, 1.5]
    texts = [json.dumps({"title": "Ü", "film.year": year, "cast": ["A"]}) for year in years]
    counts = write_table(release(tmp_path, [texts[0], "no JSON", *texts[1:]], 7), data)
    assert counts.to_json() == {"rows": 5, "left_out": 1}
    rows, columns = tables(tmp_path)
    assert rows[2] == {"genre": 7, "title": "Ü", "film.year": 1994, "cast": ["A"]}
    assert columns.column_names == ["genre", "title", "film.year", "cast"]
    assert columns.schema.types == [pa.int64(), pa.string(), pa.float64(), pa.list_(pa.string())]
    assert columns["film.year"].to_pylist() == years


@pytest.mark.parametrize("values", [[1, "x"], [{}, {}], [[1], {"a": 1}], [True, 1], [2**70, 1]])
def test_a_column_without_one_type_is_json_in_parquet(tmp_path: Path, values: list[Any]) -> None:
    texts = [json.dumps({"a": value, "b": "text"}) for value in values]
    assert write_table(release(tmp_path, texts), AB).to_json() == {"rows": 2, "left_out": 0}
    rows, columns = tables(tmp_path)
    assert [row["a"] for row in rows] == values
    assert [json.loads(text) for text in columns["a"].to_pylist()] == values


def test_a_date_stays_the_text_that_its_format_allows(tmp_path: Path) -> None:
    """Neither 0000-01-01 nor 2023-02-29 is a date of Arrow's or Python's."""
    data = DataConfig(path="x", text=("day", "n"), public_size=9)
    days = ["2024-02-29", "0000-01-01", "2023-02-29", "2024-01-01T23:59:60Z"]
    texts = [json.dumps({"day": day, "n": 1}) for day in days]
    assert write_table(release(tmp_path, texts), data).to_json() == {"rows": 4, "left_out": 0}
    rows, columns = tables(tmp_path)
    assert [row["day"] for row in rows] == columns["day"].to_pylist() == days
    assert columns.schema.field("day").type == pa.string()


def test_conversations_are_lists_of_messages(tmp_path: Path) -> None:
    data = DataConfig(path="x", turns="messages", public_size=9)
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert write_table(release(tmp_path, [json.dumps(said)]), data).rows == 1
    rows, columns = tables(tmp_path)
    assert rows == columns.to_pylist() == [{"messages": said}]


def test_a_table_may_have_no_row(tmp_path: Path) -> None:
    assert write_table(release(tmp_path, ["words"]), AB).to_json() == {"rows": 0, "left_out": 1}
    rows, columns = tables(tmp_path)
    assert rows == [] and columns.num_rows == 0


def test_types_of_later_parts_may_not_hold_earlier_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "ROWS_IN_MEMORY", 1)
    values = [2**60 + 1, 0.5]
    texts = [json.dumps({"a": value, "b": 1}) for value in values]
    assert write_table(release(tmp_path, texts), AB).rows == 2
    assert [json.loads(text) for text in tables(tmp_path)[1]["a"].to_pylist()] == values


def test_deep_nesting_is_json_in_parquet(tmp_path: Path) -> None:
    """Parquet writes more levels than it reads."""
    deep = "[" * 200 + "]" * 200
    assert write_table(release(tmp_path, [f'{{"a": {deep}}}']), AB).rows == 1
    assert tables(tmp_path)[1]["a"].to_pylist() == [deep]


def test_half_a_surrogate_pair_is_a_question_mark(tmp_path: Path) -> None:
    """A text without a schema may escape one, and the run is charged already."""
    text = '{"a": "so \\ud83d", "b": {"\\ud83d": 1}}'
    assert write_table(release(tmp_path, [text]), AB).rows == 1
    rows, columns = tables(tmp_path)
    assert rows == columns.to_pylist() == [{"a": "so ?", "b": {"?": 1}}]


def test_rows_of_a_run_without_noise_are_stamped(tmp_path: Path) -> None:
    file = tmp_path / "synthetic.jsonl"
    file.write_text(json.dumps({"text": '{"a": 1, "b": 2}', "label": None, "not_private": True}))
    assert write_table(file, AB).to_json() == {"rows": 1, "left_out": 0}
    rows, columns = tables(tmp_path)
    assert rows == columns.to_pylist() == [{"a": 1, "b": 2, "not_private": True}]
