"""The token ids of a training's texts lie in files that all ranks map and each reads a little of.

The records are read and encoded once, before a rank starts, in shards that each hold whole units
(`write_shard`). Every rank maps all of them (`MappedUnits`): its memory does not grow with the
number of records. A shard is a folder, named by the SHA-256 of its files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from dpray.io.files import make_private, sha256_of, write_durably
from dpray.methods.dp_sgd.training.step import TrainingText
from dpray.types import InputError

DIGEST_BYTES = 16
"""Two units of one digest would be taken for one: with 10^8 units that has a chance of 1e-23."""

IDS, TEXTS, UNITS = "ids.bin", "texts.npy", "units.npy"
"""A shard's files: the texts' ids one after the other; where each text begins, its length and
`given`; and where each unit's texts end."""

SHARDS = "shards.json"
"""The file that names the shards. It is written last."""

NOT_SHARED = (
    "output.path: a machine of the training does not see this folder; put it on a disk that all "
    "nodes share"
)


def write_shard(folder: Path, texts: Iterable[tuple[str, int, TrainingText]], most: int) -> str:
    """Write texts, each with its unit's name and its rank in that unit, in any order; of each unit
    the `most` texts of lowest rank are kept. The units' names are not in the files.

    Returns the shard's name. The same texts make the same shard, so a task that Ray repeats does no
    harm. Raises InputError if the folder is not there.
    """
    if not folder.is_dir():
        raise InputError(NOT_SHARED)
    part = folder / f"{uuid4().hex}.part"
    make_private(part)
    _write_files(part, texts, most)
    name = _digest_of(part)
    try:
        os.rename(part, folder / name)
    except OSError:
        if not (folder / name).is_dir():
            raise
        shutil.rmtree(part)
    return name


def _write_files(folder: Path, texts: Iterable[tuple[str, int, TrainingText]], most: int) -> None:
    digests, numbers = bytearray(), array("q")
    with open(folder / IDS, "wb") as file:
        for unit, rank, text in texts:
            np.asarray(text.ids, dtype=np.int32).tofile(file)
            name = unit.encode("utf-8", "surrogatepass")
            digests += hashlib.blake2b(name, digest_size=DIGEST_BYTES).digest()
            numbers.extend((rank, len(text.ids), text.given))
    high_N, low_N = np.frombuffer(digests, dtype=np.uint64).reshape(-1, 2).T
    rank_N, length_N, given_N = np.frombuffer(numbers, dtype=np.int64).reshape(-1, 3).T
    begin_N = np.cumsum(length_N) - length_N

    order_N = np.lexsort((rank_N, low_N, high_N))
    high_N, low_N = high_N[order_N], low_N[order_N]
    is_first_N = np.ones(len(order_N), dtype=bool)
    is_first_N[1:] = (high_N[1:] != high_N[:-1]) | (low_N[1:] != low_N[:-1])
    first_U = np.flatnonzero(is_first_N)
    texts_U = np.diff(first_U, append=len(order_N))
    place_N = np.arange(len(order_N)) - np.repeat(first_U, texts_U)
    kept = order_N[place_N < most]
    np.save(folder / TEXTS, np.stack((begin_N, length_N, given_N), axis=1)[kept])
    np.save(folder / UNITS, np.cumsum(np.minimum(texts_U, most)))


def write_names(folder: Path, names: Iterable[str]) -> None:
    """Name the shards that hold all records; none is missing then."""
    # A name that is there twice is that of two shards with other units and the same texts.
    write_durably(folder / SHARDS, json.dumps(sorted(names)), private=True)


def shard_names(folder: Path) -> list[str]:
    """Return the names of the shards. Raises InputError if the folder is not there."""
    if not folder.is_dir():
        raise InputError(NOT_SHARED)
    try:
        names: list[str] = json.loads((folder / SHARDS).read_text())
    except ValueError:
        raise InputError(f"output.path: {folder / SHARDS} is damaged; remove the folder") from None
    return names


def check_shards(folder: Path, names: Sequence[str]) -> None:
    """Raise InputError unless these shards hold what was written."""
    for name in names:
        try:
            is_whole = _digest_of(folder / name) == name
        except FileNotFoundError:
            is_whole = False
        if not is_whole:
            raise InputError(
                f"output.path: {folder} does not hold the token ids that were written there; "
                "remove the folder"
            )


def _digest_of(shard: Path) -> str:
    digests = "".join(sha256_of(shard / name) for name in (IDS, TEXTS, UNITS))
    return hashlib.sha256(digests.encode()).hexdigest()


class MappedUnits:
    """Every unit's texts, from these shards in `folder`, in the same order for all who map them. A
    text's ids are read when they are used."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._shards = [_MappedShard(folder / name) for name in names]
        self._ends_S = np.cumsum([len(shard) for shard in self._shards])

    def __len__(self) -> int:
        return int(self._ends_S[-1]) if self._shards else 0

    def __getitem__(self, unit: int, /) -> list[TrainingText]:
        if not 0 <= unit < len(self):
            raise IndexError(unit)
        number = int(np.searchsorted(self._ends_S, unit, side="right"))
        shard = self._shards[number]
        return shard.texts(unit - int(self._ends_S[number]) + len(shard))


class _MappedShard:
    def __init__(self, folder: Path) -> None:
        ids = folder / IDS
        # An empty file cannot be mapped.
        self._ids: npt.NDArray[np.int32] = (
            np.asarray(np.memmap(ids, dtype=np.int32, mode="r"))
            if ids.stat().st_size
            else np.empty(0, dtype=np.int32)
        )
        self._texts_N3 = _mapped(folder / TEXTS)
        self._ends_U = _mapped(folder / UNITS)

    def __len__(self) -> int:
        return len(self._ends_U)

    def texts(self, unit: int) -> list[TrainingText]:
        first = int(self._ends_U[unit - 1]) if unit else 0
        rows = self._texts_N3[first : int(self._ends_U[unit])].tolist()
        return [
            TrainingText(self._ids[begin : begin + length], given) for begin, length, given in rows
        ]


def _mapped(path: Path) -> npt.NDArray[Any]:
    return np.asarray(np.load(path, mmap_mode="r"))
