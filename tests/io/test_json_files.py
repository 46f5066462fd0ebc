"""JSON arrays are read object by object, whatever the parts that come from the file."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.io import json_files
from dpray.io.formats import AS_RECOGNISED, FileFormat, Piece
from dpray.io.json_files import PEEKED, read_json
from dpray.io.pieces import cut
from dpray.io.records import read_file_header, read_rows, scan_piece
from dpray.types import InputError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
OBJECTS = st.lists(st.dictionaries(st.text(max_size=4), VALUES, max_size=4), max_size=6)


def rows_of(content: bytes) -> list[Any]:
    stream = io.BufferedReader(io.BytesIO(content))  # type: ignore[type-var]
    return [(where.row, row) for where, row in read_json("a.json", stream, AS_RECOGNISED)]


@given(OBJECTS, st.sampled_from([None, 3]), st.booleans(), st.integers(0, 200))
def test_an_array_gives_its_objects_wherever_a_part_ends(
    objects: list[dict[str, Any]], indent: int | None, ascii_only: bool, before_end: int
) -> None:
    written = json.dumps(objects, indent=indent, ensure_ascii=ascii_only)
    # Blanks put the end of the first part at any sign of the array; its only line is long.
    blanks = " " * (PEEKED - before_end)
    content = f"[{blanks}\n{written[1:]}".encode("utf-8", "surrogatepass")
    assert rows_of(content) == list(enumerate(objects, start=1))


def test_a_long_object_is_read_whole() -> None:
    long = {"text": "x" * 5 * PEEKED + '"', "n": 10**30, "f": 1.5e300}
    assert rows_of(json.dumps([{"a": 1}, long, {"b": 2}]).encode()) == [
        (1, {"a": 1}),
        (2, long),
        (3, {"b": 2}),
    ]


@pytest.mark.parametrize(
    ("content", "rows", "message"),
    [
        ('[{"a": 1}, 7, {"b": 2}]', [1, 3], "row 2: not a JSON object"),
        ('[{"a": 1} {"b": 2}]', [1], "row 1: not valid JSON (an array of objects)"),
        ('[{"a": 1}, {"b": Marlowe}]', [1], "row 2: not valid JSON"),
        ('[{"a": 1}', [1], "row 1: not valid JSON"),
        ('[{"a": 1}] Marlowe', [1], "row 1: not valid JSON"),
        ("[" * 100_000, [], "row 1: not valid JSON"),
        ('[{"a": ' + "9" * 5000 + "}]", [], "row 1: not valid JSON"),
    ],
    ids=["number", "comma", "word", "end", "after", "deep", "digits"],
)
def test_what_is_wrong_in_an_array(content: str, rows: list[int], message: str) -> None:
    found = rows_of(content.encode())
    assert [number for number, row in found if not isinstance(row, InputError)] == rows
    [error] = [str(row) for _, row in found if isinstance(row, InputError)]
    assert message in error and "Marlowe" not in error


def test_bytes_that_are_not_utf_8_are_found_in_their_object() -> None:
    found = rows_of(b'[{"a": "\xe9"}, {"a": "x"}]')
    assert "row 1: the bytes are not valid UTF-8" in str(found[0][1]) and found[1][1] == {"a": "x"}


def test_an_array_is_not_cut_at_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("\n[\n" + ",\n".join('{"a": 1}' for _ in range(50)) + "]")
    assert cut(Piece(str(path)), 20) == [Piece(str(path))]
    assert len(list(read_rows(str(path)))) == 50
    assert json_files.is_array("\ufeff \n[")


def test_rows_after_a_bad_one_are_read(tmp_path: Path) -> None:
    """An owner's check lists all errors of a file."""
    lines = ['{"text": "x"}', "Marlowe", "", '{"text": "y"}', "[]", '{"text": "caf\xe9"}']
    (tmp_path / "a.jsonl").write_bytes("\n".join(lines).encode("latin-1"))
    (tmp_path / "a.csv").write_bytes(b'text,n\nx,1\nMarlowe\n"y"y,2\n\ncaf\xe9,3\nz,4\n')
    form = FileFormat(keys="data.")
    found = {
        name: [
            (where.row, str(row) if isinstance(row, InputError) else row["text"])
            for where, row in scan_piece(Piece(str(tmp_path / name), format=form))
        ]
        for name in ("a.jsonl", "a.csv")
    }
    windows = (
        "the bytes are not valid UTF-8; for a file from Windows or Excel, set data.encoding=cp1252"
    )
    assert found["a.jsonl"] == [
        (1, "x"),
        (2, "a.jsonl, row 2: not valid JSON (one object a line)"),
        (4, "y"),
        (5, "a.jsonl, row 5: not a JSON object"),
        (6, f"a.jsonl, row 6: {windows}"),
    ]
    keys = "data.delimiter, data.quote, data.escape"
    assert found["a.csv"] == [
        (1, "x"),
        (2, "a.csv, row 2: not as many fields as the header has"),
        (3, f"a.csv, row 3: not valid CSV (its keys: {keys})"),
        (4, f"a.csv, row 4: {windows}"),
        (5, "z"),
    ]


def test_a_header_says_how_a_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("id;note, long;label\n1;x;Marlowe\n".encode("utf-16"))
    header = read_file_header(str(tmp_path / "a.csv"))
    assert (header.kind, header.encoding, header.delimiter) == ("csv", "utf-16", ";")
    assert header.columns == ("id", "note, long", "label")
    (tmp_path / "a.json").write_text('[{"note": {"body": "Marlowe", "tags": []}, "label": 1}]')
    header = read_file_header(str(tmp_path / "a.json"))
    assert header.columns == ("note.body", "note.tags", "label")
    assert (header.kind, header.encoding, header.delimiter) == ("json", "utf-8", None)
