"""Text files: JSON lines and arrays, what is wrong in them, and the rows after a bad one."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from dpray.io.formats import AS_RECOGNISED, FileFormat, FilePart
from dpray.io.one_object import PANDAS
from dpray.io.records import cut, read_file_header, read_rows, scan_part
from dpray.io.text_files import START, read_json
from dpray.types import InputError


def rows_of(content: bytes) -> list[Any]:
    stream = io.BufferedReader(io.BytesIO(content))  # type: ignore[type-var]
    return [(where.row, row) for where, row in read_json("a.json", stream, AS_RECOGNISED)]


def test_an_array_gives_its_objects_also_beyond_its_start() -> None:
    objects: list[Any] = [{"a": 1}, {"text": "é" * 5 * START + '"', "n": 10**30}, {"b": None}]
    for indent in (None, 2):
        written = json.dumps(objects, indent=indent, ensure_ascii=indent is None)
        assert rows_of(b"\n " + written.encode()) == list(enumerate(objects, start=1))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"a": 1}, 7, {"b": 2}]', "row 2: not a JSON object"),
        ('[{"a": 1}\n {"b": Marlowe}]', "line 2: not valid JSON (an array of objects)"),
        ('[{"a": 1}', "line 1: not valid JSON"),
        ('[{"a": 1}] Marlowe', "line 1: not valid JSON"),
        ("[" * 100_000, "line 1: not valid JSON"),
        ('[{"a": ' + "9" * 5000 + "}]", "line 1: not valid JSON"),
        ('[{"a": 1},\n{"a": "\udce9"}]', "line 2: the bytes are not valid UTF-8"),
    ],
    ids=["number", "comma", "end", "after", "deep", "digits", "bytes"],
)
def test_what_is_wrong_in_an_array(content: str, message: str) -> None:
    found = rows_of(content.encode("utf-8", "surrogateescape"))
    [error] = [str(row) for _, row in found if isinstance(row, InputError)]
    assert message in error and "Marlowe" not in error


def test_an_array_is_not_cut_at_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("\n[\n" + ",\n".join('{"a": 1}' for _ in range(50)) + "]")
    assert cut(FilePart(str(path)), 20) == [FilePart(str(path))]
    assert len(list(read_rows(str(path)))) == 50


def test_rows_after_a_bad_one_are_read(tmp_path: Path) -> None:
    """An owner's check lists all errors of a file."""
    lines = ['{"text": "x"}', "Marlowe", "", '{"text": "y"}', "[]", '{"text": "caf\xe9"}']
    (tmp_path / "a.jsonl").write_bytes("\n".join(lines).encode("latin-1"))
    (tmp_path / "a.csv").write_bytes(b'text,n\nx,1\nMarlowe\n"y"y,2\n\ncaf\xe9,3\nz,4\n')
    form = FileFormat(keys="data.")
    found = {
        name: [
            (where.row, str(row) if isinstance(row, InputError) else row["text"])
            for where, row in scan_part(FilePart(str(tmp_path / name), format=form))
        ]
        for name in ("a.jsonl", "a.csv")
    }
    other = (
        "the bytes are not valid UTF-8; save the file in UTF-8, or set data.encoding "
        "(`dpray check` lists what fits)"
    )
    assert found["a.jsonl"] == [
        (1, "x"),
        (2, "a.jsonl, row 2: not valid JSON (one object a line)"),
        (4, "y"),
        (5, f"a.jsonl, row 5: not a JSON object; pandas writes objects by {PANDAS}"),
        (6, f"a.jsonl, row 6: {other}"),
    ]
    keys = "data.delimiter, data.quote, data.escape"
    assert found["a.csv"] == [
        (1, "x"),
        (
            2,
            "a.csv, row 2: not as many fields as the header has: too few; correct the row, or "
            "remove it if it is a total",
        ),
        (3, f"a.csv, row 3: not valid CSV (its keys: {keys})"),
        (4, f"a.csv, row 4: {other}"),
        (5, "z"),
    ]


def test_a_header_says_how_a_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("id;note, long;label\n1;x;Marlowe\n".encode("utf-16"))
    header = read_file_header(str(tmp_path / "a.csv"))
    assert (header.columns, header.delimiter) == (["id", "note, long", "label"], ";")
    (tmp_path / "a.json").write_text('[{"note": {"body": "Marlowe", "tags": []}, "label": 1}]')
    header = read_file_header(str(tmp_path / "a.json"))
    assert (header.columns, header.delimiter) == (["note.body", "note.tags", "label"], None)
