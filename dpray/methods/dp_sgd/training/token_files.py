"""The token ids of a training's texts lie in files that all ranks map and each reads a little of.

Units are divided among shards by a public hash of their names. Each rank encodes one shard
(`write_shard`), and every rank maps them all (`MappedUnits`): a rank's memory does not grow with
the number of records.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dpray.methods.dp_sgd.training.step import TrainingText

DIGEST_BYTES = 16
"""Two units of one digest would be taken for one: with 10^8 units that has a chance of 1e-23."""


def shard_of(unit: str, shards: int) -> int:
    """Return the shard that a unit belongs to, by its name only."""
    return int.from_bytes(_digest(unit), "little") % shards


def write_shard(
    folder: Path, shard: int, texts: Iterable[tuple[str, int, TrainingText]], most: int
) -> None:
    """Write a shard's texts, each with its unit's name and its rank in that unit, in any order; of
    each unit the `most` texts of lowest rank are kept. The units' names are not in the files."""
    digests, numbers = bytearray(), array("q")
    with open(folder / f"ids-{shard}.bin", "wb") as file:
        for unit, rank, text in texts:
            np.asarray(text.ids, dtype=np.int32).tofile(file)
            digests += _digest(unit)
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
    np.save(folder / f"texts-{shard}.npy", np.stack((begin_N, length_N, given_N), axis=1)[kept])
    np.save(folder / f"units-{shard}.npy", np.cumsum(np.minimum(texts_U, most)))


class MappedUnits:
    """Every unit's texts, from the files of `shards` shards in `folder`, in the same order for all
    who map them. A text's ids are read when they are used."""

    def __init__(self, folder: Path, shards: int) -> None:
        self._shards = [_MappedShard(folder, shard) for shard in range(shards)]
        self._ends_S = np.cumsum([len(shard) for shard in self._shards])

    def __len__(self) -> int:
        return int(self._ends_S[-1])

    def __getitem__(self, unit: int, /) -> list[TrainingText]:
        if not 0 <= unit < len(self):
            raise IndexError(unit)
        number = int(np.searchsorted(self._ends_S, unit, side="right"))
        shard = self._shards[number]
        return shard.texts(unit - int(self._ends_S[number]) + len(shard))


class _MappedShard:
    def __init__(self, folder: Path, shard: int) -> None:
        ids = folder / f"ids-{shard}.bin"
        # An empty file cannot be mapped.
        self._ids: npt.NDArray[np.int32] = (
            np.asarray(np.memmap(ids, dtype=np.int32, mode="r"))
            if ids.stat().st_size
            else np.empty(0, dtype=np.int32)
        )
        self._texts_N3 = _mapped(folder / f"texts-{shard}.npy")
        self._ends_U = _mapped(folder / f"units-{shard}.npy")

    def __len__(self) -> int:
        return len(self._ends_U)

    def texts(self, unit: int) -> list[TrainingText]:
        first = int(self._ends_U[unit - 1]) if unit else 0
        rows = self._texts_N3[first : int(self._ends_U[unit])].tolist()
        return [
            TrainingText(self._ids[begin : begin + length], given) for begin, length, given in rows
        ]


def _digest(unit: str) -> bytes:
    encoded = unit.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(encoded, digest_size=DIGEST_BYTES).digest()


def _mapped(path: Path) -> npt.NDArray[Any]:
    return np.asarray(np.load(path, mmap_mode="r"))
