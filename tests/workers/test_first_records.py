"""All files are looked at before a run is charged, and columns that no key names are not read."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import zipfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.config.config import DataConfig
from dpray.io import records
from dpray.io.columns import is_empty, value_name
from dpray.io.formats import FilePart, folder_columns
from dpray.io.records import cut, read_part, scan_part
from dpray.io.settings_file import read_tree
from dpray.methods.config import parse_config
from dpray.types import InputError
from dpray.workers.rows import check_first_records, data_files, record_rows

Settings = Callable[..., dict[str, Any]]

GOOD = {"text": "Marlowe", "label": "a"}


def data(path: Path, **keys: Any) -> DataConfig:
    return DataConfig(path=str(path), label="label", labels=("a", "b"), public_size=9, **keys)


def lines(path: Path, *rows: Any) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


TABLE = "text,label,n\n" + "Marlowe,a,1\n"
REST = 'Marlowe,a,1\n"two\nlines",b,2\n' * 5000


@pytest.mark.parametrize(
    ("total", "why"),
    [
        ("Total,10000\n", "too few; correct the row, or remove it if it is a total"),
        ("Total,,10000", "label is not one of data.labels; if the row is a total, remove it"),
        ('"Total","","10,000"\r\n\r\n', "label is not one of data.labels; if the row is a total"),
        (",,10000\n", "the text is empty .*; if the row is a total"),
        ('Total,a,"10000\n', "not valid CSV"),
        ("\xff,a,1\n", "the bytes are not valid UTF-8"),
    ],
)
@pytest.mark.parametrize("rest", ["", REST])
def test_a_total_below_a_table_is_refused_before_the_charge(
    tmp_path: Path, total: str, why: str, rest: str
) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes((TABLE + rest + total).encode("latin-1"))
    place = "the last row" if rest else "row 2"
    with pytest.raises(InputError, match=rf"^a\.csv, {place}: .*{why}") as refused:
        check_first_records(data(file))
    assert "Marlowe" not in str(refused.value) and "Total" not in str(refused.value)


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "zst": lambda plain: pa.compress(plain, "zstd", asbytes=True),
}


def zipped(plain: bytes) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.csv", plain)
    return held.getvalue()


@pytest.mark.parametrize(
    ("packed", "encoding", "rest"),
    [
        *((packed, "utf-8", "x" + REST) for packed in (None, *PACKED, "zip")),
        *((None, encoding, "xy😀" + REST) for encoding in ("utf-16", "utf-16-be", "utf-32")),
        ("gz", "utf-16", ""),
        ("zip", "utf-32", "x" + REST),
    ],
)
@pytest.mark.parametrize("total", ["Total,10000\n", "Märlowe,b,3\r\n"])
def test_a_total_is_found_in_any_compression_and_encoding(
    tmp_path: Path, packed: str | None, encoding: str, rest: str, total: str
) -> None:
    plain = (TABLE + rest + total).encode(encoding)
    file = tmp_path / ("a.csv" if packed is None else f"a.csv.{packed}")
    file.write_bytes((PACKED | {"zip": zipped}).get(packed or "", bytes)(plain))
    found = data(file, **({"encoding": encoding} if encoding == "utf-16-be" else {}))
    if total.startswith("M"):
        check_first_records(found)
        return
    with pytest.raises(InputError, match=r": not as many fields .* if it is a total"):
        check_first_records(found)


def test_a_very_long_compressed_file_is_not_looked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((TABLE + REST + "Total,1\n").encode()))
    monkeypatch.setattr(records, "LOOKED_THROUGH", len(TABLE + REST))
    check_first_records(data(tmp_path / "a.csv.gz"))


@pytest.mark.parametrize(
    ("last", "keys"),
    [
        ("Marlowe,b,3\n\n", {}),
        ("Marlowe,b,3", {"encoding": "cp1252"}),
        ('"Marlowe\nMarlowe,x,y\nMarlowe",b,3\n', {}),
        # The end of a cell, though it looks like a row.
        ('"Marlowe\n,"",""",b,3\n', {}),
        (' ,b,3\n', {"empty": "skip"}),
        ("Märlowe,b,3\n", {"encoding": "utf-16"}),
    ],
)  # fmt: skip
def test_a_last_row_that_is_a_record_or_cannot_be_told_is_none(
    tmp_path: Path, last: str, keys: dict[str, Any]
) -> None:
    (tmp_path / "a.csv").write_bytes((TABLE + REST + last).encode(keys.get("encoding", "utf-8")))
    found = data(tmp_path / "a.csv", **keys)
    check_first_records(found)
    assert len([*record_rows(data_files(found)[0], found)]) == 10_002 - ("empty" in keys)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "z.jsonl",
            '{"text": "Marlowe"}\n' * 2,
            "z.jsonl, row 1: no column 'label'; there are: text",
        ),
        ("z.csv", "text,label\nMarlowe,c\n", "z.csv, row 1: the label is not one of data.labels"),
        (
            "z.csv",
            "note;label\nMarlowe;a\n",
            "z.csv, row 1: no column 'text'; there are: note, label",
        ),
        ("z.json", '{"$schema": "x"}', "z.json: a JSON Schema"),
        ("z.json", '[{"name": "x"}]', "z.json, row 1: no column 'text'; there are: name"),
        ("z.parquet", "Marlowe", "z.parquet, row 1: not a valid Parquet file"),
        ("z.csv", b"text,label\n\xff\xfe,a\n", "z.csv, row 1: the bytes are not valid UTF-8"),
    ],
)
def test_a_later_file_is_refused_before_the_charge(
    tmp_path: Path, name: str, content: str | bytes, said: str
) -> None:
    lines(tmp_path / "a.jsonl", GOOD)
    lines(tmp_path / "b.jsonl")
    check_first_records(data(tmp_path))
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InputError) as refused:
        check_first_records(data(tmp_path))
    assert said in str(refused.value) and "Marlowe" not in str(refused.value)


def test_only_a_data_set_without_any_row_is_refused(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl")
    (tmp_path / "b.csv").write_text("text,label\n")
    with pytest.raises(InputError, match=r"^data\.path: .* holds no rows$"):
        check_first_records(data(tmp_path))
    lines(tmp_path / "c.jsonl", GOOD)
    check_first_records(data(tmp_path))
    found = [
        row for part in data_files(data(tmp_path)) for row in record_rows(part, data(tmp_path))
    ]
    assert [row["text"] for row in found] == ["Marlowe"]


LATE = 2932897
"""The first day of the year 10000, which Python has no date for, in days since 1970."""


@pytest.mark.parametrize(
    ("groups", "row"), [(7, 6), (7, 1100), (2000, 0), (2000, 1023), (2000, 1024)]
)
def test_a_value_that_cannot_be_read_is_an_error_of_its_row_if_the_column_is_used(
    tmp_path: Path, row: int, groups: int
) -> None:
    days = [1] * 1101
    days[row] = LATE
    table = pa.table(
        {"text": ["x"] * 1101, "label": ["a"] * 1101, "day": pa.array(days, pa.date32())}
    )
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(table, path, row_group_size=groups)
    parts = cut(FilePart(str(path), columns=frozenset({"text", "label"})), 1000)
    assert len([r for part in parts for r in read_part(part)]) == 1101
    used = cut(FilePart(str(path), columns=frozenset({"text", "day"})), 1000)
    found = [(w.row, r) for part in used for w, r in scan_part(part)]
    assert [number for number, _ in found] == [*range(1, 1102)]
    [(number, error)] = [each for each in found if isinstance(each[1], InputError)]
    assert number == row + 1
    assert f"a.parquet, row {row + 1}: column 'day' has a value that" in str(error)


def test_columns_of_a_method_are_read_too(tmp_path: Path) -> None:
    pa.parquet.write_table(
        pa.table({"text": ["x"], "label": ["a"], "stars": [5.0], "n": [1]}), tmp_path / "a.parquet"
    )
    values = {"stars": ("1", "5"), "label": ("a", "b")}
    [part] = data_files(data(tmp_path))
    assert part.columns == {"text", "label"}
    [row] = record_rows(part, data(tmp_path), values)
    assert row["columns"] == {"stars": "5", "label": "a"}


@pytest.mark.parametrize(
    ("value", "written", "name"),
    [
        (True, [True, False], "true"),
        (None, [None, "x"], "null"),
        (float("nan"), [None, "x"], "null"),
        (1, [1, 2], "1"),
        (1.0, [1, 2], "1"),
        (1, [1.0, 5.0], "1.0"),
        (5.0, [1.0, 5.0], "5.0"),
        (0.5, [0.5], "0.5"),
        (date(2024, 1, 2), ["2024-01-02"], "2024-01-02"),
        ("", ["", "x"], ""),
        ("1.0", [1, 2], "1"),
    ],
)
def test_values_of_a_control_column_keep_their_names(
    settings: Settings, value: Any, written: list[Any], name: str
) -> None:
    """A file's value is found among the configured ones, whatever type either has."""
    tree = settings(
        method={
            "name": "dp_sgd",
            "control_columns": {"label": "Kind", 7: "Seven"},
            "control_values": {7: dict.fromkeys(written, 1.0 / len(written))},
        }
    )
    config = parse_config(tree)
    shares = config.method.model_dump()["control_values"]["7"]
    assert value_name(value, shares) == name and name in shares


@pytest.mark.parametrize(
    ("file", "found"),
    [
        ("d/label=a/x=1/p.csv", {"label": "a", "x": "1"}),
        ("d/label=a/b/p.csv", {}),
        ("d/label=a%2Fb%20c/p.csv", {"label": "a/b c"}),
        ("d/label=__HIVE_DEFAULT_PARTITION__/p.csv", {"label": None}),
        ("d/label=/p.csv", {"label": ""}),
        ("d/=a/p.csv", {}),
        ("d/a=b=c/p.csv", {"a": "b=c"}),
        ("s3://bucket/label=é/p.csv", {"label": "é"}),
        ("label=a.csv", {}),
    ],
)
def test_columns_of_folders(file: str, found: dict[str, Any]) -> None:
    assert folder_columns(file) == found


@pytest.mark.parametrize(
    ("labels", "value"), [(["a", "b"], "a"), ([1, 2], "1"), ([True, False], "true"), (["01"], "01")]
)
def test_a_label_of_a_folder_has_the_type_of_the_configured_one(
    tmp_path: Path, labels: list[Any], value: str
) -> None:
    (folder := tmp_path / f"label={value}").mkdir()
    lines(folder / "a.jsonl", {"text": "x"})
    (folder / "b.csv").write_text("text\nx\n")
    pa.parquet.write_table(pa.table({"text": ["x"]}), folder / "c.parquet")
    made = DataConfig(path=str(tmp_path), label="label", labels=labels, public_size=9)
    check_first_records(made)
    found = [row["label"] for part in data_files(made) for row in record_rows(part, made)]
    assert found == [value] * 3


UNSEEN = (
    "\u200b\ufeff\u2060\u00ad\ufe0f\u200d\u200e\u202e\u061c\u180e\u3164\u115f\u2800\U000e0041\U000e0100"
    "\x00\x1b\x7f\x85 \t\n\u00a0\u3000\u2028"
)


@given(st.text(st.sampled_from(UNSEEN)), st.text(st.characters(categories=["L", "N", "P"])))
def test_a_text_that_nobody_sees_is_empty(unseen: str, seen: str) -> None:
    assert is_empty(unseen)
    kept = seen.translate(dict.fromkeys(map(ord, "\u3164\u115f\u1160\uffa0")))
    assert is_empty(unseen + kept + unseen) == (kept == "")


SIGNS = st.sampled_from(",;|\t~^:#!$%&*+/<>?@_¦§¶")


@given(SIGNS, st.sampled_from(["delimiter", "quote", "escape"]))
def test_a_sign_after_the_file_is_as_it_is_typed(sign: str, key: str) -> None:
    with TemporaryDirectory() as folder:
        (config := Path(folder) / "job.yaml").write_text("data: {path: x}\n")
        assert read_tree(config, [f"data.{key}={sign}"])["data"] == {"path": "x", key: sign}


@given(
    st.sampled_from(["x", "text", "label", "a b", ""]), st.sampled_from(["csv", "jsonl", "json"])
)
def test_a_name_that_is_there_twice_is_an_error_only_if_a_key_names_it(
    name: str, kind: str
) -> None:
    pairs = [("text", "x"), ("label", "a"), (name, "x"), (name, "b")]
    row = "{" + ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in pairs) + "}"
    table = "\n".join(",".join(cells) for cells in zip(*pairs, strict=True))
    content = {"csv": table + "\n", "jsonl": row, "json": f"[{row}]"}[kind]
    with TemporaryDirectory() as folder:
        (file := Path(folder) / f"a.{kind}").write_text(content)
        if name in ("text", "label"):
            said = rf"^a\.{kind}, row 1: column '{name}' is named twice"
            with pytest.raises(InputError, match=said):
                check_first_records(data(file))
        else:
            check_first_records(data(file))


def test_of_an_object_only_the_named_fields_are_read(tmp_path: Path) -> None:
    days = pa.array([1, LATE], pa.date32())
    note = pa.StructArray.from_arrays([pa.array(["x", "y"]), days], ["body", "day"])
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.table({"note": note, "label": ["a", "b"]}), path)
    rows = [
        row["note"] for _, row in read_part(FilePart(str(path), columns=frozenset({"note.body"})))
    ]
    assert rows == [{"body": "x"}, {"body": "y"}]
    found = [*scan_part(FilePart(str(path), columns=frozenset({"note"})))]
    assert [isinstance(row, InputError) for _, row in found] == [False, True]
    with pytest.raises(
        InputError, match=r"row 1: no column 'note.text'; there are: note.body, note"
    ):
        next(read_part(FilePart(str(path), columns=frozenset({"note.text"}))))


def test_a_row_of_another_label_is_no_record_and_moves_no_other(tmp_path: Path) -> None:
    """Whether a row is one depends on the row only, as for an empty text. What is no label is
    another one."""
    others: list[object] = ["c", None, ["a"], {"a": 1}, float("nan"), 3]
    rows: list[dict[str, object]] = [
        {"text": f"text {n}", "label": ["a", "b", others[n % 6]][n % 3]} for n in range(36)
    ]
    keys = {"label": "label", "labels": ("a", "b"), "public_size": 20, "other_labels": "skip"}

    def texts(some: list[dict[str, object]]) -> list[object]:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in some))
        found = DataConfig(path=str(path), text="text", **keys)
        return [row["text"] for row in record_rows(data_files(found)[0], found)]

    known = [row for row in rows if row["label"] in ("a", "b")]
    assert texts(rows) == [row["text"] for row in known] == texts(known) and len(known) == 24
    keys["other_labels"] = "refuse"
    with pytest.raises(InputError, match=r"row 3: column 'label'"):
        texts([*rows[:2], {"text": "t", "label": None}])
    with pytest.raises(InputError, match=r"the label is not one of data\.labels"):
        texts([*rows[:2], {"text": "t", "label": "c"}])
