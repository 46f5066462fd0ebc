"""A JSON file that is one object: its rows under a key, and what its errors say and hide."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.io.columns import text_of
from dpray.io.formats import FileFormat, FilePart
from dpray.io.records import cut, read_file_header, scan_part
from dpray.io.text_files import START
from dpray.types import InputError

KEYS = FileFormat(keys="data.")

ROWS = [{"text": "Marlowe", "label": "a"}, {"text": "Marlowe too", "label": "b"}]

LINES = 'write it by df.to_json("FILE.jsonl", orient="records", lines=True)'


def scan(path: Path, form: FileFormat = KEYS) -> list[tuple[int, Any]]:
    return [(where.row, row) for where, row in scan_part(FilePart(str(path), format=form))]


def raise_(error: InputError) -> None:
    raise error


def message(path: Path, column: str = "text", form: FileFormat = KEYS) -> str:
    """Return the error of a file's first row."""
    where, row = next(scan_part(FilePart(str(path), format=form)))
    with pytest.raises(InputError) as wrong:
        text_of(row, column, where) if isinstance(row, dict) else raise_(row)
    assert "Marlowe" not in str(wrong.value) and "\n" not in str(wrong.value)
    return str(wrong.value)


def under(name: str, rows: Any) -> Any:
    for key in reversed(name.split(".")):
        rows = [rows] if key == "0" else {key: rows, "count": 2, "next_page": None}
    return rows


@given(
    name=st.sampled_from(["tickets", "data.items", "pages.0.tickets", "hits.hits"]),
    indent=st.sampled_from([None, 1, 4]),
    fill=st.sampled_from([0, 5 * START]),
)
def test_rows_are_read_under_a_key(
    tmp_path_factory: pytest.TempPathFactory, name: str, indent: int | None, fill: int
) -> None:
    path = tmp_path_factory.mktemp("data") / "export.json"
    rows = [*ROWS, {"text": "x" * fill, "label": "é"}]
    path.write_text(json.dumps(under(name, rows), indent=indent, ensure_ascii=False))
    form = FileFormat(keys="data.", records=name)
    assert scan(path, form) == list(enumerate(rows, start=1))
    assert list(read_file_header(str(path), form).columns) == ["text", "label"]
    assert cut(FilePart(str(path), format=form), 20) == [FilePart(str(path), format=form)]
    assert "records" in message(path)


def test_pages_of_an_export_are_one_file(tmp_path: Path) -> None:
    pages = [{"tickets": ROWS}, {"tickets": []}, {"tickets": None}, {"tickets": ROWS[:1]}]
    form = FileFormat(keys="data.", records="tickets")
    for content in ("\n".join(map(json.dumps, pages)) + "\n", json.dumps(pages, indent=2)):
        (tmp_path / "a.json").write_text(content)
        found = scan(tmp_path / "a.json", form)
        assert found == list(enumerate([*ROWS, ROWS[0]], start=1))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"tickets": ROWS, "next_page": None}, "set data.records=tickets to read the list in it"),
        ({"meta": {"n": 2}, "page": {"items": ROWS}}, "set data.records=page.items to read"),
        (
            {"tickets": ROWS, "users": [{"id": 3}]},
            "set data.records to the list of the records, one of tickets, users",
        ),
        ({"Ann Ray": ROWS, "Bob Lee": ROWS}, "records are lines of JSON, or an array"),
        ({"Ann Ray": ROWS}, "records are lines of JSON, or an array"),
        ({"Ann Ray": "Marlowe", "Bob Lee": "Marlowe"}, "records are lines of JSON, or an array"),
        ({"people": {"Ann Ray": ROWS, "Bob Lee": ROWS}}, "records are lines of JSON, or an array"),
        ({"Ann Ray": ROWS[0], "Bob Lee": ROWS[1]}, LINES),
        ({"text": ["Marlowe", "x"], "Ann Ray": ["a", "b"]}, f"a list for each column; {LINES}"),
        ({"fields": ["text"], "rows": [["Marlowe"]]}, "records are lines of JSON, or an array"),
    ],
)
@pytest.mark.parametrize("indent", [None, 2])
def test_errors_name_the_list_and_nobody(
    tmp_path: Path, content: Any, said: str, indent: int | None
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(content, indent=indent))
    for column in ("note", "tickets", "Ann Ra"):
        shown = message(tmp_path / "a.json", column).replace(f"'{column}'", "")
        assert said in shown and "Ann" not in shown and "Bob" not in shown
    if indent is None:
        shown = str(read_file_header(str(tmp_path / "a.json"), KEYS))
        assert said in shown and "Ann" not in shown


def test_a_key_that_leads_to_no_list(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"tickets": ROWS, "count": 2}))
    for records, more in (
        ("tikets", "; set data.records=tickets"), ("count", ""), ("tickets.0", ""),
        ("tickets.0.text", ""),
    ):  # fmt: skip
        said = message(tmp_path / "a.json", form=FileFormat(keys="data.", records=records))
        assert f"data.records: '{records}' leads to no list{more}" in said


@pytest.mark.parametrize(
    "content", ['{"tickets": [{"text": "Marlowe"}', '{"a": [\n1,\n2', "[1, 2]"]
)
def test_what_is_no_object_with_records(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    message(tmp_path / "a.json", form=FileFormat(keys="data.", records="tickets"))


def frame(index: list[Any] | None = None) -> pd.DataFrame:
    return pd.DataFrame(ROWS, index=index)


@pytest.mark.parametrize("index", [None, ["Ann Ray", "Bob Lee"]])
@pytest.mark.parametrize(
    ("orient", "said"),
    [
        ("columns", f"orient=columns or index; {LINES}"),
        ("index", f"orient=columns or index; {LINES}"),
        ("split", f"orient=split; {LINES}"),
        ("table", "pandas wrote it with orient=table; set data.records=data"),
        (
            "values",
            'pandas writes objects by df.to_json("FILE.jsonl", orient="records", lines=True',
        ),
    ],
)
@pytest.mark.parametrize("write", [frame, lambda index: frame(index)[["text"]]])
@pytest.mark.parametrize("indent", [None, 2])
def test_what_pandas_writes_is_named_with_the_remedy(
    tmp_path: Path,
    index: list[str] | None,
    orient: str,
    said: str,
    write: Callable[[Any], pd.DataFrame],
    indent: int | None,
) -> None:
    path = tmp_path / "a.json"
    write(index).to_json(path, orient=orient, indent=indent or 0)  # type: ignore[call-overload]
    if orient == "columns" and index and write is not frame:
        said = "records are lines of JSON, or an array"  # it may be a record with a nested field
    shown = message(path)
    assert said in shown and "Ann" not in shown and "Bob" not in shown


def test_what_pandas_writes_as_a_table_is_read(tmp_path: Path) -> None:
    frame(["Ann Ray", "Bob Lee"]).to_json(tmp_path / "a.json", orient="table")
    found = scan(tmp_path / "a.json", FileFormat(keys="data.", records="data"))
    assert [row["text"] for _, row in found] == ["Marlowe", "Marlowe too"]
    frame().to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    assert [row for _, row in scan(tmp_path / "a.jsonl")] == ROWS


def test_one_record_is_a_record(tmp_path: Path) -> None:
    """A conversation, or a folder of files of one record each."""
    said = {"messages": [{"role": "user", "content": "Hi"}], "label": "a"}
    for row in (said, ROWS[0], {"note": {"body": "x"}, "meta": {"body": "y"}}):
        (tmp_path / "a.json").write_text(json.dumps(row))
        assert scan(tmp_path / "a.json") == [(1, row)]


def test_a_file_of_lines_may_begin_with_a_long_or_a_broken_one(tmp_path: Path) -> None:
    long = {"tickets": ROWS, "text": "x" * 2 * START}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(long)}\n{json.dumps(ROWS[0])}\n")
    assert scan(tmp_path / "a.jsonl") == [(1, long), (2, ROWS[0])]
    (tmp_path / "b.jsonl").write_text('{"text":\n' + f"{json.dumps(ROWS[0])}\n" * START)
    found = scan(tmp_path / "b.jsonl")
    assert "row 1: not valid JSON" in str(found[0][1]) and len(found) == START + 1
