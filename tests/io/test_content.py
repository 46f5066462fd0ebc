"""A file whose bytes are of another kind than its name says is named with the remedy."""

from __future__ import annotations

import bz2
import gzip
import io
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.io.content import check_content
from dpray.io.records import read_file_header, read_rows
from dpray.types import InputError

LINES = b'{"text": "Marlowe"}\n' * 40
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"


def zipped(name: str) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(name, LINES)
    return made.getvalue()


def parquet() -> bytes:
    made = io.BytesIO()
    pa.parquet.write_table(pa.table({"text": ["Marlowe"]}), made)
    return made.getvalue()


CONTENTS = {
    ".gz": gzip.compress(LINES),
    ".bz2": bz2.compress(LINES),
    ".zst": pa.compress(LINES, codec="zstd", asbytes=True),
    ".zip": zipped("a.jsonl"),
    ".xlsx": zipped("[Content_Types].xml"),
    ".parquet": parquet(),
    ".pdf": b"%PDF-1.7\n" + LINES,
    ".html": b"\n<!DOCTYPE html><html>Marlowe",
    ".tar": b"a.jsonl".ljust(257, b"\0") + b"ustar" + LINES,
}
NAMES = (
    "a.jsonl", "a.json", "a.csv", "a.tsv.gz", "a.csv.bz2", "a.jsonl.zst", "a.zip", "a.parquet",
    "a.pq", "a.arrow", "a.feather",
)  # fmt: skip


@pytest.mark.parametrize("ending", CONTENTS)
def test_bytes_by_another_name(tmp_path: Path, ending: str) -> None:
    for name in NAMES:
        file = tmp_path / name
        file.write_bytes(CONTENTS[ending])
        is_right = name.endswith(ending) or (name, ending) == ("a.pq", ".parquet")
        for read in (lambda name: list(read_rows(name)), read_file_header):
            if is_right:
                read(str(file))
                continue
            with pytest.raises(InputError) as refused:
                read(str(file))
            assert f"{name}: the bytes are those of a {ending} file; " in str(refused.value)
            assert "Marlowe" not in str(refused.value)


def test_a_pointer_in_place_of_a_file(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).write_bytes(POINTER)
        with pytest.raises(InputError, match=r"a Git LFS pointer; run git lfs pull$"):
            list(read_rows(str(tmp_path / name)))


@given(
    st.text(st.characters(exclude_categories=["Cc", "Cs"])),
    st.sampled_from(["utf-8", "utf-16", "cp1252"]),
)
def test_a_text_is_no_other_kind(text: str, encoding: str) -> None:
    for start in ("", "PAR1,", "BZh9", "ORC "):
        check_content("a.csv", (start + text.replace("<", "")).encode(encoding, "ignore"), "csv")
