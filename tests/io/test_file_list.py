"""Each record is read once, whatever links, copies and descriptions a folder holds."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow.fs
import pytest

from dpray.io.file_list import _glob, file_digests, list_files
from dpray.types import InputError


def names(folder: Path, path: str = "") -> list[str]:
    return [str(Path(file).relative_to(folder)) for file in list_files(str(folder / path))]


def test_a_link_to_a_folder_is_not_followed(tmp_path: Path) -> None:
    texts = tmp_path / "loop" / "a"
    texts.mkdir(parents=True)
    (texts / "1.txt").write_text("x")
    (texts / "self").symlink_to(".")
    (texts / "up").symlink_to("..")
    (tmp_path / "loop" / "b").symlink_to("a")
    assert names(tmp_path, "loop") == ["loop/a/1.txt"]
    assert names(tmp_path, "loop/*/*.txt") == ["loop/a/1.txt"]
    (tmp_path / "named").symlink_to("loop")
    assert names(tmp_path, "named") == ["named/a/1.txt"]


@pytest.mark.parametrize("pattern", ["{}/*/*.csv", "{}/x/?.csv", "{}/*/?.c*"])
def test_a_star_matches_within_one_level(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "x" / "y").mkdir(parents=True)
    for file in ("x/a.csv", "x/y/b.csv", "c.csv", "x/.d.csv"):
        (tmp_path / file).write_text(file)
    assert names(tmp_path, pattern.format(tmp_path)) == ["x/a.csv"]
    root = pyarrow.fs.SubTreeFileSystem(str(tmp_path.parent), pyarrow.fs.LocalFileSystem())
    bucket = tmp_path.name
    assert _glob(root, pattern.format(bucket)) == [f"{bucket}/x/a.csv"]


@pytest.mark.parametrize(
    ("log", "path"),
    [
        ("_delta_log/0.json", ""), ("_delta_log/0.json", "*.csv"),
        ("_delta_log/0.json", "day=1"), ("metadata/1.metadata.json", "data"),
        ("metadata/1.metadata.json", "data/*.csv"), ("metadata/1.metadata.json", "data/d=1/a.csv"),
    ],
)  # fmt: skip
def test_the_files_of_a_table_are_no_set_of_rows(tmp_path: Path, log: str, path: str) -> None:
    for file in ("a.csv", "day=1/a.csv", "data/a.csv", "data/d=1/a.csv", log):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("text\na\n")
    with pytest.raises(InputError, match="table, whose files also have deleted rows; write one"):
        list_files(str(tmp_path / path))
    (tmp_path / log).rename(tmp_path / log.replace("json", "txt"))  # another folder of that name
    assert list_files(str(tmp_path / path))


@pytest.mark.parametrize("path", ["", "*.csv", "a*"])
@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_one_file_has_one_name(tmp_path: Path, path: str, link: object) -> None:
    (tmp_path / "a.csv").write_text("text,label\n")
    assert callable(link)
    link(tmp_path / "a.csv", tmp_path / "ab.csv")
    with pytest.raises(InputError, match=r"a\.csv and .*ab\.csv are one file"):
        list_files(str(tmp_path / path))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("notes.csv", "notes.csv.gz"),
        ("notes.CSV", "notes.csv.zst"),
        ("notes.csv", "notes.zip"),
        ("notes.csv.gz", "notes.zip"),
        ("notes.csv.zip", "notes.zip"),
        ("notes.jsonl.gz", "notes.jsonl.zst"),
    ],
)
def test_a_file_and_its_compressed_form_are_refused(
    tmp_path: Path, first: str, second: str
) -> None:
    for name in (first, second, "other.csv", "notes.csv.json", "zip.zip"):
        (tmp_path / name).write_text(name)
    for path in ("", "*"):
        with pytest.raises(InputError) as refused:
            list_files(str(tmp_path / path))
        assert f"/{first} " in str(refused.value) and f"/{second} " in str(refused.value)
    (tmp_path / second).unlink()
    assert len(list_files(str(tmp_path))) == 4


@pytest.mark.parametrize(
    "content",
    [*({"_data_files": value} for value in ([{"filename": 5}], [5], [], {}, 5)), [], 5, {}],
)
def test_a_description_of_another_form(tmp_path: Path, content: object) -> None:
    (tmp_path / "state.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="is not that of save_to_disk"):
        list_files(str(tmp_path))


def test_a_saved_data_set_does_not_list_a_file_twice(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_bytes(b"x")
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}] * 2}))
    with pytest.raises(InputError, match="are one file"):
        list_files(str(tmp_path))


def test_folders_with_values_are_read_through(tmp_path: Path) -> None:
    for file in ("year=2024/month=1/a.csv", "year=2024/b.parquet", "c.csv", "year=2024/.d=1/e.csv",
                 "other/f.csv", "year=2024/_SUCCESS", "year=2024/.a.csv.crc"):  # fmt: skip
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(file)
    assert names(tmp_path) == ["c.csv", "year=2024/b.parquet", "year=2024/month=1/a.csv"]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["a/b.csv"], "lie deeper (1); give 'data.path=FOLDER/*/*.csv'"),
        (["a/b/c.jsonl.gz", "a/b/d.jsonl.gz"], "lie deeper (2); give 'data.path=FOLDER/*/*/*.gz'"),
        (["a/b.csv", "a/b.jsonl"], "lie deeper (2); give 'data.path=FOLDER/*/*'"),
        (["a/b/1.txt"], "lie deeper (1); give 'data.path=FOLDER/*/*/*.txt'"),
        (["1.txt", "a/b/1.txt"], "texts lie at several depths; give 'data.path=FOLDER/*/*/*.txt'"),
        (["a/5001", "b/5002", "_SUCCESS"], "a/5001 and 1 more: a name without an ending; end the"),
        (["a/12."], "a/12.: a name without an ending"),
        (["a.tar.gz"], "a.tar.gz: a kind of file that is not read (.tar); unpack it"),
        (["a.tgz"], "(.tgz); unpack it"),
        (["a.xls"], "(.xls); save it as .xlsx"),
        (["x.sqlite3"], "(.sqlite3); an SQLite file? data.path=sqlite:///office.db with data.que"),
        (["x.pst"], "(.pst); save the mails as .eml or .mbox"),
        (["1.eml", "a/b/1.eml"], "texts lie at several depths; give 'data.path=FOLDER/*/*/*.eml'"),
        (["a.docx"], "(.docx); convert it to one of .jsonl"),
        (["a.xz"], "(.xz); unpack it"),
        (["_SUCCESS", ".part.crc"], "the folder holds no files that are read"),
    ],
)
def test_a_folder_says_where_its_files_are(tmp_path: Path, files: list[str], said: str) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("Marlowe")
    with pytest.raises(InputError) as refused:
        list_files(str(tmp_path))
    assert said.replace("FOLDER", str(tmp_path)) in str(refused.value).replace("\n", " ")
    if "give '" in said:
        glob = said.split("data.path=")[1].strip("'").replace("FOLDER", str(tmp_path))
        assert list_files(glob)


def test_moving_a_file_to_another_value_changes_its_digest(tmp_path: Path) -> None:
    found = set()
    for value in ("a", "b"):
        (folder := tmp_path / f"label={value}").mkdir()
        (folder / "x.csv").write_text("text\nx\n")
        found |= {*file_digests(str(folder / "x.csv"))}
    assert len(found) == 2
