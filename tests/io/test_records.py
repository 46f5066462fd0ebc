from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.io.columns import column_of, text_of
from dpray.io.file_list import file_digests, fingerprint, list_files
from dpray.io.files import holds_secret
from dpray.io.formats import FileFormat, FilePart, Where
from dpray.io.records import count_rows, cut, numbered, read_file_header, read_part, read_rows
from dpray.methods.config import parse_config
from dpray.types import InputError


def test_files_of_a_path_a_folder_and_a_glob(tmp_path: Path) -> None:
    for name in ("one.jsonl", "two.csv", "three.parquet", "notes.txt"):
        (tmp_path / name).write_text('{"n": 1}\n')
    names = [Path(file).name for file in list_files(str(tmp_path))]
    assert names == ["one.jsonl", "three.parquet", "two.csv"]
    assert [Path(f).name for f in list_files(f"{tmp_path}/t*")] == ["three.parquet", "two.csv"]
    assert list_files(f"file://{tmp_path}/one.jsonl") == [f"file://{tmp_path}/one.jsonl"]
    assert [row for _, row in read_rows(f"file://{tmp_path}/one.jsonl")] == [{"n": 1}]


@pytest.mark.parametrize(
    "path", ["s3://KEY:SECRET@bucket/x.jsonl", "s3://KEY:SEC/RET@bucket/", "gs://:SECRET@b/*.csv"]
)
def test_a_password_in_a_path_is_refused_and_not_repeated(path: str) -> None:
    with pytest.raises(
        InputError, match=r"^--real: a password, key or token has no place in it"
    ) as told:
        list_files(path, "--real")
    assert "SEC" not in str(told.value)


@pytest.mark.parametrize(
    "path",
    [
        "abfss://box@account.dfs.core.windows.net/x.csv?sv=1&sig=SECRET",
        "s3://bucket/x.csv?secret_key=SECRET",
        "s3://bucket/x.csv?region=a&X-Amz-Security-Token=SECRET",
        "gs://bucket/x.csv?X-Goog-Signature=SECRET",
        "https://host/x.csv?access_token=SECRET",
        "https://host/x.csv?API_KEY=SECRET",
        "s3:/KEY:SECRET@bucket/x.csv",
    ],
)
def test_a_token_in_a_path_is_refused_and_not_repeated(
    path: str, settings: Callable[..., dict[str, Any]]
) -> None:
    """Also by the configuration, in any key, before a plan or a release shows it."""
    for refuse in (
        lambda: list_files(path),
        lambda: parse_config(settings(data__path=path)),
        lambda: parse_config(settings(engine__model=path)),
        lambda: parse_config(settings(engine__base_url=path)),
        lambda: parse_config(settings(method__few_shot=path)),
    ):
        with pytest.raises(InputError, match=r"^[a-z._]+: a password, key or token") as told:
            refuse()
        assert "SECRET" not in str(told.value)


@pytest.mark.parametrize(
    "path",
    ["http://host/SECRET.csv", "https://SECRET@host/x.csv", "ftp://host/SECRET", "az://c/SECRET"],
)
def test_a_link_is_not_read_and_not_repeated(path: str) -> None:
    """Nothing is read by plain http, nor by https: neither is a file system."""
    with pytest.raises(InputError, match=r"^data\.path: nothing is read from there") as told:
        list_files(path)
    assert "SECRET" not in str(told.value)


def test_other_signs_in_a_path_are_no_password() -> None:
    others = (
        "s3://bucket/a:b@c.jsonl", "abfss://box@account/x.csv", "hdfs://host:8020/a@b.csv",
        "a?key=b", "s3://b/x?region=y",
    )  # fmt: skip
    assert not any(map(holds_secret, others))


def test_rows_are_streamed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\nbroken\n')
    rows = read_rows(str(tmp_path / "a.jsonl"))
    assert next(rows)[1] == {"n": 1}
    with pytest.raises(InputError):
        next(rows)


def test_a_text_holds_what_utf_8_can_hold() -> None:
    """JSON may hold half of a surrogate pair; a tokenizer stops at it."""
    row = {"text": json.loads(r'"caf\u00e9 \ud83d."')}
    assert text_of(row, "text", Where("a.jsonl", 1)) == "café ?."
    with pytest.raises(InputError, match=r"^a.jsonl, row 1: no column 'note'; there are: text$"):
        text_of(row, "note", Where("a.jsonl", 1))


def test_a_fingerprint_is_of_all_contents_in_order(tmp_path: Path) -> None:
    def of(**files: str) -> str:
        folder = tmp_path / "-".join(files.values())
        folder.mkdir()
        for name, text in files.items():
            (folder / f"{name}.jsonl").write_text(text)
        return fingerprint(file_digests(str(folder)))

    assert len({of(a="1", b="2"), of(a="2", b="1"), of(a="12", b="")}) == 3
    (tmp_path / "copy.jsonl").write_text("1")
    (tmp_path / "1-2" / "b.jsonl").unlink()
    [copy] = file_digests(str(tmp_path / "copy.jsonl"))
    assert [copy] == file_digests(str(tmp_path / "1-2"))
    assert file_digests("hf://owner/name") == [b"hf://owner/name"]


def test_files_are_hashed_with_a_report_that_may_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpray.io.file_list.REPORT_SECONDS", 0.001)
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_bytes(name.encode() * 8_000_000)
    shares: list[float] = []
    digests = file_digests(str(tmp_path), shares.append)
    assert digests == [hashlib.sha256(name.encode() * 8_000_000).digest() for name in "ab"]
    assert shares == sorted(shares) and all(0 <= share <= 1 for share in shares)
    assert len(set(shares)) > 1

    def stop(share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        file_digests(str(tmp_path), stop)


LINES = st.lists(st.sampled_from(['{"n": 1}', '{"text": "é"}', "", "  ", "\u00a0", " {}"]))


@given(LINES, st.sampled_from(["", "\n"]), st.integers(1, 40))
def test_a_row_of_jsonl_has_its_number_however_the_file_is_cut(
    lines: list[str], end: str, size: int
) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        path.write_text("\ufeff" * (size % 2) + "\n".join(lines) + end, encoding="utf-8")
        parts = cut(FilePart(str(path)), size)
        if len(parts) > 1:
            parts = list(numbered(parts, map(count_rows, parts)))
        rows = list(read_rows(str(path)))
        places = [
            (part.rows + number, row)
            for part in parts
            for number, row in enumerate(read_part(part))
        ]
        assert places == list(enumerate(rows))
        assert len(parts) == max(1, -(-path.stat().st_size // size))


def test_parquet_is_cut_between_its_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"n": range(100), "text": ["text"] * 100})
    pyarrow.parquet.write_table(table, path, row_group_size=7)
    parts = cut(FilePart(str(path)), 300)
    assert 3 < len(parts) <= 15 and parts[0].end == parts[1].begin
    rows = list(read_rows(str(path)))
    assert [row for part in parts for row in read_part(part)] == rows
    assert [part.rows for part in parts] == [7 * part.begin for part in parts]
    assert cut(FilePart(str(path)), 10**6) == [FilePart(str(path))]


def test_an_error_in_a_part_names_the_row_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n' * 9 + "\nbroken\n")
    parts = cut(FilePart(str(path)), 20)
    *_, last = numbered(parts, map(count_rows, parts))
    with pytest.raises(InputError, match=r"^a.jsonl, row 11: not valid JSON"):
        list(read_part(last))


def test_what_cannot_be_cut_is_one_part(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text\n"a\nb"\n')
    (tmp_path / "broken.parquet").write_text("PAR1 is not what it is")
    for file in (*map(str, tmp_path.iterdir()), "hf://owner/name"):
        assert cut(FilePart(file), 3) == [FilePart(file)]


def test_errors_show_no_name_that_looks_like_a_value_and_none_of_later_rows(tmp_path: Path) -> None:
    """A file without a header has its first row in the header's place; a later row of JSON may have
    names of its own."""
    where = Where("a.csv", 1)
    row = {"id": "1", "Patient Anna Miller b. 1961 has HIV": "x"}
    with pytest.raises(InputError) as refused:
        column_of(row, "text", where)
    assert "there are: id (and 1 that look like values" in str(refused.value)
    assert "Miller" not in str(refused.value)
    with pytest.raises(InputError) as refused:
        column_of({"Anna Miller": 1}, "text", Where("a.jsonl", 2))
    assert str(refused.value) == "a.jsonl, row 2: no column 'text'"


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, 97])
@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_a_damaged_zip_is_refused(tmp_path: Path, name: str, compression: int) -> None:
    path = tmp_path / "a.zip"
    known = zipfile.ZIP_DEFLATED if compression == 97 else compression
    with zipfile.ZipFile(path, "w", known) as archive:
        archive.writestr(name, "Marlowe " * 999)
    content = bytearray(path.read_bytes())
    begin = 30 + len(name)
    content[begin + 9 : begin + 40] = b"\xff" * 31
    content[content.rindex(b"PK\x01\x02") + 10] = compression
    path.write_bytes(content)
    for read in (lambda: list(read_rows(str(path))), lambda: read_file_header(str(path))):
        with pytest.raises(InputError, match=r"not a whole \.zip file") as wrong:
            read()
        assert "Marlowe" not in str(wrong.value)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_without_a_mark_is_named(tmp_path: Path, encoding: str) -> None:
    contents = {"a.csv": "text,label\nMarlowe,b\n", "a.jsonl": '{"text": "x"}\n' * 9}
    contents |= {"a.json": '[{"text": "x"}]', "b/a.txt": "Marlowe", "b/b.txt": "ЖMarlowe"}
    (tmp_path / "b").mkdir()
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content.encode(encoding))
        parts = cut(FilePart(str(tmp_path / name), format=FileFormat(keys="data.")), size=20)
        with pytest.raises(InputError, match=f"set data.encoding={encoding}$"):
            list(read_part(parts[0]))
        rows = read_rows(str(tmp_path / name), FileFormat(encoding=encoding))
        assert next(rows)[1]["text"] in ("x", "Marlowe", "ЖMarlowe")


@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
def test_arrow_with_offsets_beyond_its_texts(tmp_path: Path, new: Any) -> None:
    """Arrow itself would read other memory of the process, or end it."""
    path, table = tmp_path / "a.arrow", pa.table({"text": ["Marlowe"] * 3})
    with new(path, table.schema) as writer:
        writer.write_table(table)
    offsets = b"".join(n.to_bytes(4, "little") for n in (0, 7, 14, 21))
    for wrong in (2**30, 2**32 - 7):
        changed = offsets[:8] + wrong.to_bytes(4, "little") + offsets[12:]
        content = path.read_bytes().replace(offsets, changed)
        (tmp_path / "b.arrow").write_bytes(content)
        with pytest.raises(InputError, match=r"^b\.arrow, row 1: not a valid Arrow file"):
            list(read_rows(str(tmp_path / "b.arrow")))


def test_parquet_with_a_column_whose_name_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pa.table({"number": range(100)}), path, row_group_size=7)
    path.write_bytes(path.read_bytes().replace(b"number", b"\xeeumber"))
    assert cut(FilePart(str(path)), 300) == [FilePart(str(path))]
    with pytest.raises(InputError, match=r"^a\.parquet, row 1: not a valid Parquet file"):
        list(read_rows(str(path)))
