"""vLLM in parts, for a machine that has torch and takes only so much at a time.

    python -m tests.gpu.parts pack WHEELS PARTS   a folder's wheels become parts of `MOST` bytes
    python -m tests.gpu.parts join PARTS SITE     the parts become a folder for PYTHONPATH

The parts may come one after the other, in any order: `join` names those that are missing or
damaged. Of vLLM's wheel they have what a dense model needs on a GPU of one kind (`CAPABILITY`): no
FlashAttention 2, no kernels of mixtures of experts, no sources of other projects, no machine code
of other GPUs. vLLM's structured outputs are left out too: private decoding has its own schemas.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import shutil
import struct
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

MOST = 44 * 2**20
PRESET = 6
CAPABILITY = 90
"""The compute capability of the GPU, 9.0: Hopper."""
INDEX = "parts.json"
LIBRARIES = ("_C_stable_libtorch", "_vllm_fa3_C", "cumem_allocator", "spinloop", "fs_io")
"""vLLM's own compiled files are kept if their names begin like this."""
SOURCES = {".cu", ".cuh", ".h", ".hpp", ".inl", ".jinja"}
STAND_INS = {"xgrammar.py": b"GrammarMatcher = CompiledGrammar = object\n"}
"""In place of a package of 44 MB: what vLLM names at its import."""

KERNEL = struct.pack("<IHH", 0xBA55ED50, 1, 16)
"""A kernel's code for several GPUs begins with this, and the number of bytes that follow."""
CODE = struct.Struct("<HHIQQHHI")
"""The code for one GPU begins with its kind, two bytes, the size of this head, that of the code,
twelve bytes, and the GPU's compute capability."""
MACHINE_CODE = 2
"""The kind of code that is not PTX."""


def is_needed(name: str) -> bool:
    """Return whether a file of a wheel is packed, by its path in the wheel."""
    path = Path(name)
    if not name.startswith("vllm/"):
        return True
    if path.suffix == ".so":
        return path.name.startswith(LIBRARIES) and "third_party" not in path.parts
    return path.name != "vllm-rs" and path.suffix not in SOURCES


def for_one_gpu(library: bytes) -> bytes:
    """Return a library with zeros in place of the kernels' code for other GPUs, which take no space
    once they are compressed. CUDA finds a GPU's code by the heads, which stay."""
    kept, at = bytearray(library), library.find(KERNEL)
    while at >= 0:
        at += len(KERNEL) + 8
        end = at + int.from_bytes(library[at - 8 : at], "little")
        while at < end:
            kind, _, head, length, *_, capability = CODE.unpack_from(library, at)
            at += head
            if (kind, capability) != (MACHINE_CODE, CAPABILITY):
                kept[at : at + length] = bytes(length)
            at += length
        at = library.find(KERNEL, at)
    return bytes(kept)


class _Parts:
    """A file that is written into parts."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._left = folder, 0
        self.digests: dict[str, str] = {}
        self._part = bytearray()

    def write(self, data: bytes) -> int:
        self._part += data
        while len(self._part) >= MOST:
            self._save(bytes(self._part[:MOST]))
            del self._part[:MOST]
        return len(data)

    def close(self) -> None:
        if self._part:
            self._save(bytes(self._part))

    def _save(self, data: bytes) -> None:
        name = f"part-{len(self.digests)}"
        (self._folder / name).write_bytes(data)
        self.digests[name] = hashlib.sha256(data).hexdigest()


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    if name.startswith("vllm/") and name.endswith(".so"):
        data = for_one_gpu(data)
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), 0o644
    tar.addfile(entry, io.BytesIO(data))


def pack(wheels: Path, folder: Path) -> list[str]:
    """Pack what the wheels hold; return the parts' names."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    parts = _Parts(folder)
    with (
        lzma.open(parts, "wb", preset=PRESET) as packed,  # type: ignore[arg-type]
        tarfile.open(fileobj=packed, mode="w|") as tar,
    ):
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as files:
                for info in files.infolist():
                    if not info.is_dir() and is_needed(info.filename):
                        add(tar, info.filename, files.read(info))
        for name, text in STAND_INS.items():
            add(tar, name, text)
    parts.close()
    (folder / INDEX).write_text(json.dumps(parts.digests, indent=1) + "\n")
    return list(parts.digests)


class _Joined:
    """The parts as one file that is read."""

    def __init__(self, files: list[Path]) -> None:
        self._chunks = self._read(files)
        self._rest = b""

    @staticmethod
    def _read(files: list[Path]) -> Iterator[bytes]:
        for file in files:
            with file.open("rb") as data:
                while chunk := data.read(2**20):
                    yield chunk

    def read(self, size: int = -1) -> bytes:
        while (size < 0 or len(self._rest) < size) and (chunk := next(self._chunks, b"")):
            self._rest += chunk
        end = len(self._rest) if size < 0 else size
        data, self._rest = self._rest[:end], self._rest[end:]
        return data


def join(folder: Path, site: Path) -> None:
    """Unpack the parts into `site`, unless that is done. Raises SystemExit if one is not whole."""
    index = folder / INDEX
    if not index.exists():
        raise SystemExit(f"{folder}: no {INDEX}; bring the folder that `make gpu-vllm` has made")
    digests: dict[str, str] = json.loads(index.read_text())
    done = site / INDEX
    if done.exists() and done.read_text() == index.read_text():
        return
    files = [folder / name for name in digests]
    absent = [
        file.name
        for file in files
        if not file.exists() or hashlib.sha256(file.read_bytes()).hexdigest() != digests[file.name]
    ]
    if absent:
        raise SystemExit(f"{folder}: {', '.join(absent)} missing or damaged; bring them again")
    shutil.rmtree(site, ignore_errors=True)
    with (
        lzma.open(_Joined(files), "rb") as packed,  # type: ignore[call-overload]
        tarfile.open(fileobj=packed, mode="r|") as tar,
    ):
        tar.extractall(site, filter="data")
    done.write_text(index.read_text())


if __name__ == "__main__":
    work, *paths = sys.argv[1:]
    one, other = map(Path, paths)
    if work == "pack":
        print(*pack(one, other))
    else:
        join(one, other)
