"""Small files that unpack to 10 GB, rows without an end, and promises that a file does not keep.

They are read in another process, which may take 8 GiB of addresses, and says what each took.
"""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

MIB = 1 << 20
PARTS, PART = 1000, 10 * MIB
"""A bomb unpacks to 1,000 parts of 10 MiB."""

READ = """
import json, resource, sys
from time import monotonic
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
from dpray.io.records import read_file_header, read_rows
from dpray.types import InputError

def peak():
    status = open("/proc/self/status").read()
    return int(status.partition("VmHWM:")[2].split()[0]) >> 10

start = peak()
for asked in sys.stdin:
    file, what = json.loads(asked)
    with open("/proc/self/clear_refs", "w") as peaks:
        peaks.write("5")  # the next one begins
    began, said, rows = monotonic(), "", 0
    try:
        if what == "header":
            read_file_header(file)
        for _ in read_rows(file):
            rows += 1
    except InputError as error:
        said = str(error)
    found = {"said": said, "rows": rows, "mib": peak() - start, "s": monotonic() - began}
    print(json.dumps(found), flush=True)
"""

Read = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def read() -> Iterator[Read]:
    """Read a file: the error, the rows before it, the MiB that the process had at most, and the
    seconds."""
    command = [sys.executable, "-c", READ]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        asks, answers = process.stdin, process.stdout
        assert asks is not None and answers is not None

        def ask(file: Path, what: str = "rows") -> dict[str, Any]:
            asks.write(json.dumps([str(file), what]) + "\n")
            asks.flush()
            found: dict[str, Any] = json.loads(answers.readline())
            print(found)
            return found

        yield ask
        asks.close()


def gzipped(start: bytes, part: bytes) -> Iterator[bytes]:
    packed = gzip.compress(part, 6)
    yield from [gzip.compress(start), *[packed] * PARTS]


def zstandard(start: bytes, part: bytes) -> Iterator[bytes]:
    packed = pa.compress(part, codec="zstd", asbytes=True)
    yield from [pa.compress(start, codec="zstd", asbytes=True), *[packed] * PARTS]


def zipped(start: bytes, part: bytes) -> Iterator[bytes]:
    """Yield a `.zip` whose member was packed once and is repeated: the digest at its end, which
    nobody comes to, is wrong."""

    def deflated(content: bytes, end: int) -> bytes:
        packer = zlib.compressobj(6, zlib.DEFLATED, -15)
        return packer.compress(content) + packer.flush(end)

    member = deflated(start, zlib.Z_FULL_FLUSH) + deflated(part, zlib.Z_FULL_FLUSH) * PARTS
    member += deflated(b"", zlib.Z_FINISH)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("a.jsonl", b"")
    whole = bytearray(made.getvalue())
    directory = whole.index(b"PK\x01\x02")
    for at in (0, directory + 2):  # the method and the sizes, twice
        whole[at + 8 : at + 10] = (8).to_bytes(2, "little")
        sizes = (len(member), 2**32 - 2)
        whole[at + 18 : at + 26] = b"".join(size.to_bytes(4, "little") for size in sizes)
    end = whole.index(b"PK\x05\x06")
    whole[end + 16 : end + 20] = (directory + len(member)).to_bytes(4, "little")
    yield from [bytes(whole[:directory]), member, bytes(whole[directory:])]


PACKED: dict[str, Callable[[bytes, bytes], Iterator[bytes]]] = {
    "gz": gzipped,
    "zst": zstandard,
    "zip": zipped,
}

A_LINE = b'{"text": "' + b"a" * (MIB - 13) + b'"}\n'

CONTENTS = {
    "one line": ("jsonl", b'{"text": "', b"a" * PART, "a.jsonl.E, row 1: longer than 67,108,864"),
    "zeros": ("jsonl", b"", b"\0" * PART, "many bytes are null"),
    "one cell": (
        "csv",
        b'text\n"',
        (b"a" * (MIB - 1) + b"\n") * 10,
        "a.csv.E, row 1: longer than 67,108,864",
    ),
    "one header": ("csv", b"", b"text,".ljust(MIB) * 10, "a.csv.E, header: longer than"),
    "many lines": ("jsonl", A_LINE, A_LINE * 10, "a.jsonl.E: unpacks to more than 200 times"),
    "Parquet": ("parquet", b"PAR1", b"\0" * PART, "a.parquet.E: unpacks to more than 200 times"),
}


CASES = [
    ("one line", "gz"),
    ("one line", "zst"),
    ("one line", "zip"),
    ("zeros", "gz"),
    ("one cell", "zst"),
    ("one header", "gz"),
    ("many lines", "zst"),
    ("Parquet", "zst"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ending"), CASES)
def test_a_bomb_is_refused_with_little_memory(
    tmp_path: Path, read: Read, name: str, ending: str
) -> None:
    kind, start, part, said = CONTENTS[name]
    file = tmp_path / ("a.zip" if ending == "zip" else f"a.{kind}.{ending}")
    with open(file, "wb") as writer:
        writer.writelines(PACKED[ending](start, part))
    assert file.stat().st_size < 12 * MIB
    found = read(file)
    assert said.replace(f"a.{kind}.E", file.name) in found["said"]
    assert found["mib"] < 1000 and found["s"] < 120


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_a_row_without_an_end_is_refused_in_a_plain_file_too(
    tmp_path: Path, read: Read, ending: str
) -> None:
    file = tmp_path / f"a.{ending}"
    with open(file, "wb") as writer:
        writer.write(b'text\n"x"\n"' if ending == "csv" else b'{"text": "x"}\n{"text": "')
        writer.writelines([b"a" * MIB] * 70)
    found = read(file, "header")
    assert found["said"] == f"a.{ending}, row 2: longer than 67,108,864 characters"
    assert found["rows"] == 1 and found["mib"] < 1000


def test_a_row_of_many_lines_is_bounded(tmp_path: Path, read: Read) -> None:
    """No cell of it is long, and no line."""
    file = tmp_path / "a.csv"
    with open(file, "wb") as writer:
        writer.write(b"text\n")
        writer.writelines([b'"\n' + b"a" * 60 + b'",'] * 1_100_000)
    found = read(file)
    assert "row 1: longer than 67,108,864 characters" in found["said"] and found["mib"] < 1000


def test_a_row_of_the_longest_size_is_read(tmp_path: Path, read: Read) -> None:
    from dpray.io.text_files import LONGEST_ROW

    file = tmp_path / "a.jsonl"
    row = b'{"text": "' + b"a" * (LONGEST_ROW - 13) + b'"}\n'
    file.write_bytes(row + b'{"text": "x"}\n')
    assert (len(row), read(file)["rows"]) == (LONGEST_ROW, 2)
    file.write_bytes(b" " + row)
    assert "row 1: longer than" in read(file)["said"]


def test_parquet_that_promises_more_rows_than_it_has(tmp_path: Path, read: Read) -> None:
    file = tmp_path / "a.parquet"
    table = pa.table({"text": ["x"] * 100, "n": range(100)})
    pa.parquet.write_table(table, file, use_dictionary=False, compression="none")
    content = file.read_bytes()
    promised = content.replace(b"\x16\xc8\x01", b"\x16\xfe\x7f")  # 100 in Thrift, then 8,127
    assert promised != content
    file.write_bytes(promised)
    found = read(file)
    assert "not a valid Parquet file" in found["said"] or found["rows"] == 100
    assert found["mib"] < 500 and found["s"] < 60


def test_arrow_that_promises_a_huge_buffer(tmp_path: Path, read: Read) -> None:
    """A compressed buffer begins with the number of its unpacked bytes."""
    file, made = tmp_path / "a.arrow", io.BytesIO()
    table = pa.table({"text": ["x" * 90] * 100})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(made, table.schema, options=options) as writer:
        writer.write_table(table)
    content = made.getvalue()
    length = (9000).to_bytes(8, "little")
    assert length in content
    file.write_bytes(content.replace(length, (2**40).to_bytes(8, "little")))
    found = read(file)
    assert "not a valid Arrow file" in found["said"] and found["mib"] < 500
