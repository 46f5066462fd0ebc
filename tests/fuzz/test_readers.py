"""Damaged files of every kind: a reader yields rows, or refuses in one plain line that shows no
record.

`pytest --hypothesis-profile=long tests/fuzz` tries 40 times as many files.
"""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openpyxl
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpray.config.data import DataConfig
from dpray.io.formats import FileFormat, FilePart
from dpray.io.records import count_rows, cut, numbered, read_file_header, scan_part
from dpray.methods.config import load_config
from dpray.types import InputError
from dpray.workers.rows import record_rows

SECRET = "Marlowe"
ROWS = [
    {
        "text": f"{SECRET} number {n} has a longer text, with a comma; é and “quotes”",
        "label": "ab"[n % 2],
        "tags": [SECRET, "x" * n],
        "note": {"body": None if n % 3 else f"{SECRET}\tlives | here\nand there"},
        "n": n,
    }
    for n in range(40)
]
LINES = "".join(json.dumps(row, ensure_ascii=n % 2 == 0) + "\n" for n, row in enumerate(ROWS))
TABLE = pa.Table.from_pylist(ROWS)
CODED = TABLE.append_column("coded", pa.array(["x", SECRET] * 20).dictionary_encode())


def csv_text(delimiter: str, end: str = "\r\n") -> str:
    lines = ["text,label".replace(",", delimiter)]
    lines += [f'"{row["text"]} ""{n}""\n."{delimiter}{row["label"]}' for n, row in enumerate(ROWS)]
    return end.join(lines) + end


def parquet(**options: Any) -> bytes:
    made = io.BytesIO()
    pa.parquet.write_table(TABLE, made, row_group_size=11, **options)
    return made.getvalue()


def arrow(new: Callable[..., Any], table: pa.Table, compression: str | None = None) -> bytes:
    made = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with new(made, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=11)
    return made.getvalue()


def xlsx() -> bytes:
    """Return a sheet that is not packed: damage to what is packed is found by its checksum."""
    packed, made, book = io.BytesIO(), io.BytesIO(), openpyxl.Workbook()
    for row in [[*ROWS[0]], *([*map(str, row.values())] for row in ROWS)]:
        book.worksheets[0].append(row)
    book.save(packed)
    with zipfile.ZipFile(packed) as source, zipfile.ZipFile(made, "w") as archive:
        for name in source.namelist():
            archive.writestr(name, source.read(name))
    return made.getvalue()


def mails() -> bytes:
    begin = "From - Wed Jan 31 09:00:00 2024\nSubject: =?utf-8?q?{label}?=\nTo: <{n}@b.org>\n"
    plain = begin + "\n{text}\n\n"
    parts = begin + (
        "Content-Type: multipart/mixed; boundary=b\n\n--b\nContent-Type: text/html\n\n"
        "<p>{text}&amp;</p>\n--b\nContent-Transfer-Encoding: base64\n\nTWFybG93ZQ==\n--b--\n\n"
    )
    return "".join((plain, parts)[n % 2].format(**row) for n, row in enumerate(ROWS)).encode()


def zipped(name: str, content: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return made.getvalue()


FILES: dict[str, tuple[str, bytes]] = {
    "JSON lines": ("a.jsonl", LINES.encode()),
    "JSON array": ("a.json", json.dumps(ROWS, indent=1).encode()),
    "JSON in UTF-16": ("a.jsonl", LINES.encode("utf-16")),
    "CSV": ("a.csv", csv_text(",").encode()),
    "CSV with semicolons": ("a.csv", csv_text(";", "\n").encode("utf-8-sig")),
    "CSV with bars": ("a.csv", csv_text("|", "\r").encode()),
    "CSV in UTF-16": ("a.csv", csv_text(",").encode("utf-16")),
    "TSV": ("a.tsv", csv_text("\t").encode()),
    "text": ("a/a.txt", ROWS[0]["text"].encode()),  # type: ignore[attr-defined]
    "Parquet": ("a.parquet", parquet()),
    "Parquet, second version": ("a.parquet", parquet(data_page_version="2.0", compression="zstd")),
    "Parquet in the open": ("a.parquet", parquet(compression="none", use_dictionary=False)),
    "Arrow file": ("a.arrow", arrow(pa.ipc.new_file, CODED)),
    "Arrow stream": ("a.arrow", arrow(pa.ipc.new_stream, CODED)),
    "Feather, lz4": ("a.feather", arrow(pa.ipc.new_file, TABLE, "lz4")),
    "Arrow stream, zstd": ("a.arrow", arrow(pa.ipc.new_stream, TABLE, "zstd")),
    "gzip": ("a.jsonl.gz", gzip.compress(LINES.encode())),
    "zstd": ("a.csv.zst", pa.compress(csv_text(",").encode(), codec="zstd", asbytes=True)),
    "zip": ("a.zip", zipped("a.csv", csv_text(",").encode())),
    "sheet": ("a.xlsx", xlsx()),
    "mail": ("a/a.eml", mails().partition(b"\n")[2]),
    "mbox": ("a.mbox", mails()),
    "Parquet in gzip": ("a.parquet.gz", gzip.compress(parquet())),
}

WORDS = [
    b"\0", b"\xff", b"\x80", b"\x1b[2J", b"\r", b"\n", b'"', b'""', b"\\", b",", b";", b"\t", b"[",
    b"{", b"}", b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff", b"\xff\xfe\0\0", b"\xed\xa0\x80",
    b"\\ud800", b"1e999", b"NaN", b"-", b"9" * 5000, b"[" * 3000, b"\xff" * 4, b"\xff" * 8,
    b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0" * 8, (2**62).to_bytes(8, "little"),
    b"PAR1", b"ARROW1", b"PK\x03\x04", b"\x1f\x8b", b"\xe2\x80\xa8", b"\x85", b"\x1a",
]  # fmt: skip

HALF = settings(max_examples=settings.default.max_examples // 2)  # type: ignore[union-attr]

PLACES = st.integers(0, 2**20)
"""A place in a file, modulo its length."""

CHANGES = st.one_of(
    st.tuples(st.just("flip"), PLACES, st.integers(0, 7)),
    st.tuples(st.just("cut"), PLACES, st.integers(1, 60)),
    st.tuples(st.just("end"), PLACES, st.just(0)),
    st.tuples(st.just("double"), PLACES, st.integers(1, 300)),
    st.tuples(st.just("insert"), PLACES, st.sampled_from(WORDS)),
    st.tuples(st.just("replace"), PLACES, st.sampled_from(WORDS)),
    st.tuples(st.just("replace"), PLACES, st.binary(min_size=1, max_size=8)),
)
DAMAGE = st.lists(CHANGES, min_size=1, max_size=4)


def damaged(content: bytes, changes: list[tuple[str, int, Any]]) -> bytes:
    changed = bytearray(content)
    for change, place, value in changes:
        at = place % (len(changed) or 1)
        match change:
            case "flip" if changed:
                changed[at] ^= 1 << value
            case "cut":
                del changed[at : at + value]
            case "end":
                del changed[at:]
            case "double":
                changed[at:at] = changed[at : at + value]
            case "insert":
                changed[at:at] = value
            case "replace":
                changed[at : at + len(value)] = value
    return bytes(changed)


FORMATS = st.sampled_from(
    [
        FileFormat(keys="data."),
        FileFormat(encoding="cp1252"),
        FileFormat(encoding="utf-16-le"),
        FileFormat(delimiter=";", quote="", keys="data."),
        FileFormat(delimiter="\t", quote="'", escape="\\"),
    ]
)


def check_message(error: InputError, file: Path) -> None:
    """Fail unless an error is one line that names the file and shows nothing of it. A header that
    was cut off has values in the names' place, which docs/sharp_edges.md tells of."""
    said = str(error)
    assert said.isprintable() and len(said) < 1000 and file.name in said, said
    assert SECRET not in said.split("; there are: ")[0], said


def check(file: Path, content: bytes, form: FileFormat, data: DataConfig) -> None:
    """Read a file in all ways that a run reads it."""
    file.write_bytes(content)
    whole = FilePart(str(file), format=form)

    def read_all() -> None:
        for _, row in scan_part(whole):
            if isinstance(row, InputError):
                check_message(row, file)

    def read_parts() -> None:
        parts = cut(whole, 2000)
        if len(parts) > 1 and file.suffix == ".jsonl":
            parts = list(numbered(parts, map(count_rows, parts)))
        for part in parts:
            for _ in record_rows(part, data):
                pass

    for read in (read_all, read_parts, lambda: read_file_header(str(file), form)):
        try:
            read()
        except InputError as error:
            check_message(error, file)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_gives_rows_or_one_plain_line(
    name: str, tmp_path: Path, config_file: Callable[..., str]
) -> None:
    file, content = FILES[name]
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    # What is sound is read: else the damage would not be what is refused.
    path.write_bytes(content)
    assert not [row for _, row in scan_part(FilePart(str(path))) if isinstance(row, InputError)]
    data = load_config(config_file(), []).data

    @HALF
    @given(DAMAGE, FORMATS)
    def damage(changes: list[tuple[str, int, Any]], form: FileFormat) -> None:
        check(path, damaged(content, changes), form, data)

    damage()


@HALF
@given(st.binary(max_size=200), st.sampled_from([name for name, _ in FILES.values()]))
def test_any_bytes_are_rows_or_one_plain_line(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / "any" / "a"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / Path(name).name
    path.write_bytes(content)
    try:
        for _, row in scan_part(FilePart(str(path))):
            if isinstance(row, InputError):
                check_message(row, path)
    except InputError as error:
        check_message(error, path)
