"""Every row of the tables in docs/data.md is tried on a file of its kind."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import zipfile
from collections.abc import Callable, Sequence
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import openpyxl
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from dpray.methods.config import parse_config
from dpray.types import InputError
from dpray.workers.rows import check_first_records, data_files, record_rows
from tests.conftest import ROOT

Make = Callable[[Path], None]
Settings = Callable[..., dict[str, Any]]
Refused = tuple[Make, dict[str, Any]]

ROWS = [
    {"text": "Käse, Brot; 1|2", "label": "a"},
    {"text": 'drei "vier"\nfünf\\', "label": "b"},
]
RECORDS = [(row["text"], row["label"]) for row in ROWS]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
TABLE = pa.Table.from_pylist(ROWS)


def csv_text(rows: Sequence[Sequence[str]] = (), **dialect: Any) -> str:
    file = io.StringIO(newline="")
    writer = csv.writer(file, **dialect)
    writer.writerows(rows or [["text", "label"], *RECORDS])
    return file.getvalue()


def file(name: str, content: str | bytes) -> Make:
    def make(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return make


def files(*makes: Make) -> Make:
    def make(folder: Path) -> None:
        for each in makes:
            each(folder)

    return make


def packed(*names: str) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name in names:
            archive.writestr(name, csv_text())
        archive.writestr("__MACOSX/._a.csv", "what a Mac adds")
    return made.getvalue()


def stream(table: pa.Table) -> bytes:
    made = io.BytesIO()
    with pa.ipc.new_stream(made, table.schema) as writer:
        writer.write_table(table)
    return made.getvalue()


def sheets(titles: int = 0, **tables: Sequence[Sequence[object]]) -> bytes:
    """Return an `.xlsx` with a sheet for each table, and titles above the first one's header."""
    made, book = io.BytesIO(), openpyxl.Workbook()
    book.remove(book.active)
    for name, rows in tables.items():
        sheet = book.create_sheet(name)
        for row in [*[["Export"]] * titles, *rows]:
            sheet.append(row)
    book.save(made)
    return made.getvalue()


def large_sheet() -> bytes:
    """Return an `.xlsx` with a part that packs well."""
    made = io.BytesIO(sheets(Tickets=[["text"], ["Marlowe"]]))
    with (
        zipfile.ZipFile(made, "a", zipfile.ZIP_DEFLATED) as archive,
        archive.open("xl/x", "w") as part,
    ):
        for _ in range(257):
            part.write(bytes(2**20))
    return made.getvalue()


def mail(text: str, subject: str) -> bytes:
    made = EmailMessage()
    made["From"], made["Subject"] = "Ann <Ann@clinic.org>", subject
    made.set_content(text)
    return bytes(made)


def mbox(*mails: bytes) -> bytes:
    return b"".join(b"From - Wed Jan 31 09:00:00 2024\n" + each + b"\n" for each in mails)


def parquet(table: pa.Table | None = None) -> bytes:
    made = io.BytesIO()
    pa.parquet.write_table(TABLE if table is None else table, made)
    return made.getvalue()


def feather(folder: Path) -> None:
    pa.feather.write_feather(TABLE, folder / "a.feather", compression="uncompressed")


def saved(folder: Path) -> None:
    parts = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for number, part in enumerate(parts):
        (folder / part).write_bytes(stream(TABLE.slice(number, 1)))
    state = {"_data_files": [{"filename": part} for part in parts], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text('{"features": {}, "citation": ""}')


def two_names(folder: Path) -> None:
    file("a.jsonl", LINES)(folder)
    (folder / "b.jsonl").hardlink_to(folder / "a.jsonl")


def many_zeros(folder: Path) -> None:
    part = pa.compress(b" " * 2**27, codec="zstd", asbytes=True)
    (folder / "a.parquet.zst").write_bytes(part * 9)


WIDER = [("1", text, "", label, "x", "") for text, label in RECORDS]
TWICE = pa.table([*TABLE.columns, [1, 2], [3, 4]], names=["text", "label", "n", "n"])
LATE = pa.array([1, 2932897], pa.date32())  # the second is in the year 10000
ZONE = pa.array([1, 2], pa.timestamp("us", tz="Mars/Olympus"))
ODD = TABLE.append_column("late", LATE).append_column("zone", ZONE)
ZSTD = pa.compress(LINES.encode(), codec="zstd", asbytes=True)
NESTED = "".join(
    json.dumps({"note": {"body": row["text"]}, "label": row["label"]}) + "\n" for row in ROWS
)
BACKSLASHES = 'text,label\n"Käse, Brot; 1|2",a\n"drei \\"vier\\"\nfünf\\\\",b\n'
GAPS = LINES.replace("\n", '\n{"text": null, "label": "a"}\n{"text": " ", "label": "a"}\n', 1)
TWO_COLUMNS = '{"title": "x", "body": null, "label": "a"}\n'
SHORT = 'text;label\nDer "Käse" schmeckt;a\n'

SHEET = [["text", "label"], *RECORDS]
SHEETS = sheets(Tickets=SHEET, Notes=[["Marlowe"]])

SAID = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
CHATS = {"turns": "messages"}

SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": [{"text": "Hello"}]}]

JAPANESE, TOKYO = [("text", "label"), ("雨", "東京")], {"labels": ["東京"]}

RECORDS_AT = {"records": "tickets"}
LISTS = "".join(
    json.dumps({"content": [{"data": row["text"]}], "label": row["label"]}) + "\n" for row in ROWS
)

READ: dict[str, list[tuple[Make, dict[str, Any]]]] = {
    "JSON Lines: `.jsonl`, `.ndjson`, `.json`": [
        (file(name, LINES), {}) for name in ("a.jsonl", "a.ndjson", "a.json")
    ],
    "a JSON array of objects: `.json`": [
        (file("a.json", json.dumps(ROWS, indent=indent)), {}) for indent in (None, 2)
    ],
    "a list of objects under a key of a JSON object": [
        (file("a.json", json.dumps({"tickets": ROWS, "next": None}, indent=indent)), RECORDS_AT)
        for indent in (None, 2)
    ],
    "CSV with commas": [(file("a.csv", csv_text()), {})],
    "CSV with semicolons, tabs or `\\|`": [
        (file("a.csv", csv_text(delimiter=sign)), keys)
        for sign in (";", "\t", "|")
        for keys in ({}, {"delimiter": sign})
    ],
    "CSV with another delimiter, such as Hive's": [
        (file("a.csv", csv_text(delimiter="\x01")), {"delimiter": sign})
        for sign in ("\x01", "\\x01", "\\u0001")
    ],
    "`.tsv`, and `.CSV` in any case": [
        (file("a.tsv", csv_text(delimiter="\t")), {}),
        (file("A.CSV", csv_text()), {}),
    ],
    "CSV with line ends within quotes": [(file("a.csv", csv_text(quoting=csv.QUOTE_ALL)), {})],
    "CSV with backslashes before quotes": [(file("a.csv", BACKSLASHES), {"escape": "\\"})],
    "CSV without quotes around cells": [(file("a.csv", SHORT), {"quote": ""})],
    "UTF-8 with a byte order mark": [
        (file("a.csv", csv_text().encode("utf-8-sig")), {}),
        (file("a.jsonl", LINES.encode("utf-8-sig")), {}),
        (file("a.json", json.dumps(ROWS).encode("utf-8-sig")), {"encoding": "utf-8"}),
    ],
    "UTF-16 with a byte order mark": [
        (file("a.csv", csv_text(delimiter=";").encode("utf-16")), {}),
        (file("a.jsonl", LINES.encode("utf-16")), {}),
        (file("a.json", json.dumps(ROWS).encode("utf-16")), {}),
    ],
    "another encoding, such as Windows' cp1252": [
        (file("a.csv", csv_text(delimiter=";").encode("cp1252")), {"encoding": "cp1252"}),
        (file("a.jsonl", LINES.encode("cp1252")), {"encoding": "cp1252"}),
    ],
    "ISO-2022-JP, whose bytes are all ASCII": [
        (
            file("a.csv", csv_text(JAPANESE).encode("iso2022_jp")),
            {"encoding": "iso2022_jp"} | TOKYO,
        ),
        (
            file("a.jsonl", '{"text": "雨", "label": "東京"}'.encode("iso2022_jp")),
            {"encoding": "iso2022_jp"} | TOKYO,
        ),
    ],
    "CSV whose first line is `sep=;`": [
        (file("a.csv", f"{first}\r\n" + csv_text(delimiter=sign)), {})
        for first, sign in (("sep=;", ";"), ("SEP=|", "|"), ("sep=\t", "\t"), ("sep=\\t", "\t"))
    ],
    "CSV with titles above the header": [
        (file("a.csv", "Export\nof all notes\n\n" + csv_text()), {"skip_rows": 3}),
        (file("a.csv", "\ufeffExport,,\r\n" + csv_text()), {"skip_rows": 1}),
        (file("a.csv", "sep=;\r\nExport\r\n" + csv_text(delimiter=";")), {"skip_rows": 2}),
    ],
    "columns that are numbers": [
        (file("a.csv", csv_text([("0", "1"), *RECORDS])), {"text": 0, "label": 1}),
        (file("a.parquet", parquet(TABLE.rename_columns(["0", "1"]))), {"text": 0, "label": 1}),
    ],
    "headers with empty names, or unused names twice": [
        (file("a.csv", csv_text([("", "text", "n", "label", "n", ""), *WIDER])), {}),
        (file("a.jsonl", LINES.replace("{", '{"n": 1, "n": {"n": 2}, "": 3, "": 4, ')), {}),
        (file("a.json", json.dumps(ROWS).replace("{", '{"n": 1, "n": 2, ')), {}),
        (file("a.parquet", parquet(TWICE)), {}),
        (file("a.arrow", stream(TWICE)), {}),
    ],
    "columns without a key, whatever they hold": [
        (file("a.parquet", parquet(ODD)), {}),
        (file("a.arrow", stream(ODD)), {}),
        (
            file(
                "a.csv",
                csv_text([("x", "text", "label"), *(("é", *r) for r in RECORDS)])
                .encode("utf-8")
                .replace("é".encode(), b"\xe9"),
            ),
            {},
        ),
    ],
    "`.gz`, `.zst`, `.bz2`, `.zip` of one file": [
        (file("a.jsonl.bz2", bz2.compress(LINES.encode())), {}),
        (file("a.csv.gz", gzip.compress(csv_text().encode())), {}),
        (file("a.jsonl.ZST", ZSTD), {}),
        (file("a.zip", packed("notes.CSV")), {}),
    ],
    "Parquet (`.parquet`, `.pq`), also compressed": [
        (file("a.parquet", parquet()), {}),
        (file("a.PQ", parquet()), {}),
        (file("a.parquet.gz", gzip.compress(parquet())), {}),
    ],
    "Arrow files, Arrow streams, Feather": [
        (file("a.arrow", stream(TABLE)), {}),
        (file("a.arrow.gz", gzip.compress(stream(TABLE))), {}),
        (feather, {}),
    ],
    "a folder that `save_to_disk` wrote": [(saved, {})],
    "a folder of such files": [
        (
            files(
                file("a.csv", csv_text().split("\r\n")[0] + f"\r\n{RECORDS[0][0]!r},a"),
                file("b.jsonl", LINES.split("\n", 1)[1]),
                file("notes.txt", "not data"),
                file(".hidden.csv", "not data"),
            ),
            {"quote": "'"},
        )
    ],
    "a folder with parts that have no rows": [
        (
            files(
                file("part-0.csv", csv_text()),
                file("part-1.csv", "text,label\r\n"),
                file("part-2.csv", ""),
                file("part-3.json", "[]"),
                file("part-4.parquet", parquet(pa.table({}))),
                file("part-5.arrow", stream(TABLE.slice(0, 0))),
                file("part-6.jsonl.gz", gzip.compress(b"")),
                file("part-7.parquet", ""),
                file("part-8.arrow.gz", gzip.compress(b"")),
                file("_SUCCESS", ""),
                file(".part-0.csv.crc", "crc"),
            ),
            {},
        )
    ],
    "folders `name=value`, whose names are columns": [
        (
            files(
                file("label=a/x=1/1.parquet", parquet(TABLE.slice(0, 1).select(["text"]))),
                file("label=b/x=2/2.jsonl", json.dumps({"text": RECORDS[1][0]})),
            ),
            {"path": path},
        )
        for path in ("", "*/*/*")
    ]
    + [(files(file("label=a/1.txt", RECORDS[0][0]), file("label=b/2.txt", RECORDS[1][0])), {})],
    "a folder of `.txt`, labels from its folders": [
        (files(file("a/1.txt", RECORDS[0][0] + "\n"), file("b/2.txt", RECORDS[1][0])), {}),
    ],
    "texts in nested fields": [(file("a.jsonl", NESTED), {"text": "note.body"})],
    "texts in lists, here the first entry": [(file("a.jsonl", LISTS), {"text": "content.0.data"})],
    "texts of several columns, a JSON object each": [
        (file("a.jsonl", TWO_COLUMNS), {"text": ["title", "body"]})
    ],
    "conversations, lists of messages": [
        (file("a.jsonl", json.dumps({"messages": SAID, "label": "a"})), CHATS),
        (file("a.csv", csv_text([("messages", "label"), (json.dumps(SAID), "a")])), CHATS),
    ],
    "conversations as ShareGPT writes them": [
        (
            file("a.jsonl", json.dumps({"conversations": SHAREGPT, "label": "a"})),
            {"turns": "conversations"},
        )
    ],
    "null and blank texts": [(file("a.jsonl", GAPS), {"empty": "skip"})],
    "Excel's `.xlsx` with one sheet that has rows": [
        (file("a.xlsx", sheets(Empty=[], Tickets=SHEET)), {}),
        (file("a.xlsx.gz", gzip.compress(sheets(Tickets=SHEET))), {}),
    ],
    "`.xlsx` with several such sheets": [(file("a.xlsx", SHEETS), {"records": "Tickets"})],
    "`.xlsx` with titles above the header": [
        (file("a.xlsx", sheets(3, Tickets=SHEET)), {"skip_rows": 3})
    ],
    "a folder of `.eml`, labels from its folders": [
        (files(*(file(f"{label}/1.eml", mail(text, "x")) for text, label in RECORDS)), {}),
        (
            files(
                *(
                    file(f"{label}/1.eml.bz2", bz2.compress(mail(text, "x")))
                    for text, label in RECORDS
                )
            ),
            {},
        ),
    ],
    "`.mbox`": [
        (file("a.mbox", mbox(*(mail(*record) for record in RECORDS))), {"label": "subject"}),
        (
            file("a.mbox.gz", gzip.compress(mbox(*(mail(*record) for record in RECORDS)))),
            {"label": "subject"},
        ),
    ],
}

OTHER_RECORDS = {
    "ISO-2022-JP, whose bytes are all ASCII": [("雨", "東京")],
    "CSV without quotes around cells": [('Der "Käse" schmeckt', "a")],
    "texts of several columns, a JSON object each": [('{"title": "x", "body": null}', "a")],
    "conversations, lists of messages": [(json.dumps(SAID), "a")],
    "conversations as ShareGPT writes them": [(json.dumps(SAID), "a")],
}

SCHEMA = '{"$schema": "x", "type": "object",\n "properties": {}}'


def one(name: str, content: str | bytes, **keys: Any) -> Refused:
    return file(name, content), keys


def chats(*said: Any) -> str:
    return "\n".join(json.dumps({"messages": messages, "label": "a"}) for messages in said)


A_RECORD = '{"text": "x", "label": "a"}'

REFUSED: dict[str, Refused] = {
    "no such file": (files(), {"path": "none.csv"}),
    "a glob that matches nothing": (files(), {"path": "*.csv"}),
    "a glob with `**`": (files(), {"path": "**/*.csv"}),
    "a kind that is not read": one("a.xls", "Marlowe", path="a.xls"),
    "an archive": one("a.tar.gz", "Marlowe", path="a.tar.gz"),
    "a file of another kind than its name says": one("a.jsonl", gzip.compress(LINES.encode())),
    "a pointer of Git LFS": one("a.jsonl", "version https://git-lfs.github.com/spec/v1\noid x"),
    "a folder without files that are read": (files(), {}),
    "a folder whose files lie deeper": (file("a/b/c.csv", csv_text()), {}),
    "texts at several depths": (files(file("a/1.txt", "x"), file("a/b/2.txt", "y")), {}),
    "names without an ending": (files(file("a/1", "x"), file("b/2", "y")), {}),
    "a file without an ending": one("notes", csv_text(), path="notes"),
    "a single `.txt`": one("a.txt", "Marlowe", path="a.txt"),
    "a Delta table": (
        files(file("a.jsonl", LINES), file("_delta_log/00000.json", "{}")),
        {},
    ),
    "an Iceberg table, or a part of it": (
        files(file("data/a.jsonl", LINES), file("metadata/1-a.metadata.json", "{}")),
        {"path": "data"},
    ),
    "a folder of a DatasetDict": one("dataset_dict.json", '{"splits": ["train", "test"]}'),
    "a stray `schema.json` in a folder": (
        files(file("a.jsonl", LINES), file("schema.json", SCHEMA)),
        {},
    ),
    "a stray `run.json`": (
        files(file("a.jsonl", LINES), file("run.json", '{"run_id": "x",\n "state": "done"}')),
        {},
    ),
    "one JSON object over several lines": one("a.json", '{\n"text": "Marlowe"\n}'),
    "one JSON object with a list in it": one("a.json", '{"tickets": [{"text": "Marlowe"}]}'),
    "a table of pandas by columns or rows": one(
        "a.json", '{"text": {"0": "Marlowe", "1": "x"}, "label": {"0": "a", "1": "b"}}'
    ),
    "a list of lists, as pandas writes values": one("a.json", '[["Marlowe", "a"]]'),
    "a list of texts": one("a.json", '["Marlowe", "x"]'),
    "a key that does not lead to a list": one(
        "a.json", '{"tickets": [{"text": "Marlowe"}]}', records="tikets"
    ),
    "a line that is not JSON": one("a.jsonl", f"{A_RECORD}\nMarlowe"),
    "a JSON array that breaks off": one("a.json", f'[{A_RECORD}, {{"text": "Marlowe'),
    "bytes that are not UTF-8": one("a.csv", csv_text().encode("cp1252")),
    "UTF-16 without a byte order mark": one("a.csv", csv_text().encode("utf-16-le")),
    "ISO-2022-JP without its encoding": one(
        "a.csv", csv_text(JAPANESE).encode("iso2022_jp"), labels=["東京"]
    ),
    "a quote that never ends": one("a.csv", 'text,label\nx,a\n"Marlowe,b\n'),
    "a row with too few cells": one("a.csv", "text,label\nx,a\nMarlowe\n"),
    "a used column that is named twice": one("a.csv", "text,label,text\nx,a,Marlowe\n"),
    "a used key that a JSON object has twice": one(
        "a.jsonl", '{"text": "x", "label": "a", "text": "Marlowe"}'
    ),
    "a used value that JSON has no equivalent for": one(
        "a.parquet",
        parquet(pa.table({"text": ["Marlowe", "x"], "label": LATE})),
        labels=["1970-01-02", "a"],
    ),
    "many null bytes": one("a.csv", b"text,label\n" + bytes(100)),
    "a `.zip` of two files": one("a.zip", packed("a.csv", "b.csv")),
    "a `.gz` that is cut off": one("a.csv.gz", gzip.compress(csv_text().encode())[:40]),
    "a `.zip` that is damaged": one("a.zip", packed("a.csv")[:90]),
    "a single `.eml`": one("a.eml", mail("Marlowe", "x"), path="a.eml"),
    "`.xlsx` with several sheets that have rows": one("a.xlsx", SHEETS),
    "a sheet that does not exist": one("a.xlsx", SHEETS, records="Tikets"),
    "a sheet of more than 256 MiB of XML": one("a.xlsx", large_sheet()),
    "a file that is not `.xlsx`": one("a.xlsx", "Marlowe"),
    "a mail without headers": one("a/1.eml", "\nMarlowe"),
    "a mail with hundreds of nested parts": one(
        "a.mbox",
        mbox(
            mail("x", "a"), b"Content-Type: multipart/mixed; boundary=Marlowe\n\n--Marlowe\n" * 300
        ),
        label="subject",
    ),
    "a mail in an unknown encoding": one(
        "a.mbox",
        mbox(mail("x", "a"), b"Content-Type: text/plain; charset=x\n\nMarlowe \xff\n"),
        label="subject",
    ),
    "an `.mbox` that does not begin with a mail": one(
        "a.mbox", mail("Marlowe", "a"), label="subject"
    ),
    "a `.txt` in a `.zip`": one("a.zip", packed("a.txt")),
    "a file next to its compressed form": (
        files(file("a.jsonl", LINES), file("a.jsonl.gz", gzip.compress(LINES.encode()))),
        {},
    ),
    "one file under two names": (two_names, {}),
    "a file that is not Parquet": one("a.parquet", "Marlowe"),
    "a missing column": one("a.jsonl", LINES, text="txet"),
    "a text column that holds something else": one("a.jsonl", '{"text": 7, "label": "a"}'),
    "a text that is a list": one("a.jsonl", '{"text": [{"data": "Marlowe"}]}\n{}'),
    "a null or blank text": one("a.jsonl", GAPS),
    "a cell that is not a number, where the schema has one": one(
        "a.csv",
        "title,year,label\nx,1994,a\ny,Marlowe,a\n",
        text=["title", "year"],
        json_columns=["year"],
    ),
    "a message without a role": one("a.jsonl", chats(SAID, [{"content": "Marlowe"}]), **CHATS),
    "a message with another role": one(
        "a.jsonl", chats(SAID, [{"role": "Marlowe", "content": "Hi"}]), **CHATS
    ),
    "a line or a CSV row without an end": one("a.jsonl", '{"text": "' + "Marlowe" * 9_600_000),
    "a compressed file that unpacks to too much": (
        many_zeros,
        {},
    ),
    "an Arrow file with wrong offsets": one(
        "a.arrow", stream(TABLE).replace(b"\0\0\0\0\x10\0\0\0", b"\0\0\0\0\xff\xff\xff\xff")
    ),
    "a link, as `http://`": (files(), {"url": "http://host/Marlowe.csv"}),
    "a URI with a password or a token": (files(), {"url": "s3://bucket/x.csv?token=Marlowe"}),
    "a label that is null": one("a.jsonl", A_RECORD + '\n{"text": "Marlowe", "label": null}'),
    "a label that is not configured": one(
        "a.jsonl", A_RECORD + '\n{"text": "x", "label": "Marlowe"}'
    ),
    "a label of another type": one("a.jsonl", '{"text": "Marlowe", "label": 0}', labels=["0", "a"]),
    "no rows": one("a.csv", "text,label\n"),
}


def table(heading: str) -> dict[str, str]:
    text = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0].replace("\\|", "\0")
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| ")]
    return {first.strip().replace("\0", "\\|"): second.strip() for first, second in rows[1:]}


def records(settings: Settings, folder: Path, keys: dict[str, Any]) -> list[Any]:
    keys = dict(keys)
    path = keys.pop("url", str(folder / keys.get("path", "")))
    changes = {f"data__{key}": value for key, value in keys.items()} | {"data__path": path}
    data = parse_config(settings(**changes)).data
    check_first_records(data)
    found = (record for part in data_files(data) for record in record_rows(part, data))
    return [(record["text"], record["label"]) for record in found]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.mark.parametrize("name", READ)
def test_what_the_page_says_is_read(settings: Settings, folder: Path, name: str) -> None:
    assert name in table("What is read")
    for number, (make, keys) in enumerate(READ[name]):
        (place := folder / str(number)).mkdir()
        make(place)
        assert records(settings, place, keys) == OTHER_RECORDS.get(name, RECORDS), number


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_page_says_is_refused(settings: Settings, folder: Path, name: str) -> None:
    message = table("What is refused")[name].strip("`")
    make, keys = REFUSED[name]
    make(folder)
    with pytest.raises(InputError) as refused:
        records(settings, folder, keys)
    said = str(refused.value)
    assert message.replace("PATH", str(folder / keys.get("path", ""))) in said
    assert "Marlowe" not in said and "\n" not in said


def test_every_row_of_the_page_is_tried() -> None:
    assert set(table("What is read")) == set(READ)
    assert set(table("What is refused")) == set(REFUSED)
