"""Votes counted on a GPU are the exact ones; needs FAISS with GPUs, and no torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dpray.mechanisms.votes import GRID, _gpu_index, _NearestText

Rows = np.ndarray[Any, np.dtype[np.float32]]


class HostIndex:
    """Stands in for FAISS's index where there is no GPU: float32 distances, sorted."""

    def __init__(self, rows_UD: Rows) -> None:
        self.rows_UD = rows_UD

    def search(self, rows_BD: Rows, k: int) -> tuple[Rows, np.ndarray[Any, np.dtype[np.int64]]]:
        squared_BU = ((rows_BD[:, None] - self.rows_UD) ** 2).sum(2, dtype=np.float32)
        found_Bk = np.argsort(squared_BU, axis=1)[:, :k]
        return np.take_along_axis(squared_BU, found_Bk, 1), found_Bk


def on(device: str, synthetic_ND: Rows) -> _NearestText:
    search = _NearestText(synthetic_ND)
    search.gpu = (HostIndex(search.rows_UD), None)
    if device == "cuda":
        search.gpu = _gpu_index(search.rows_UD)
        if search.gpu is None:
            pytest.skip("no FAISS with GPUs")
    return search


def unit_vectors(rows: int, dimension: int, seed: int) -> Rows:
    made = np.random.default_rng(seed).standard_normal((rows, dimension)).astype(np.float32)
    return made / np.linalg.norm(made, axis=1, keepdims=True)


def near_ties(rows: int, dimension: int) -> tuple[Rows, Rows]:
    """Records, and texts of which many pairs are a few steps of the grid apart, or the same."""
    texts = unit_vectors(rows, dimension, 0)
    moved = np.random.default_rng(1).integers(-2, 3, size=texts.shape)
    moved[rows // 2 :] *= np.random.default_rng(2).random((rows - rows // 2, dimension)) < 0.02
    return unit_vectors(400, dimension, 3), np.concatenate(
        [texts, (texts + moved / GRID).astype(np.float32)]
    )


def nearest_exactly(private_MD: Rows, synthetic_ND: Rows) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The textbook in whole numbers of the grid: the lowest index of the least squared distance."""
    private, texts = (
        np.rint(rows * np.float32(GRID)).astype(np.int64) for rows in (private_MD, synthetic_ND)
    )
    return np.array([((texts - row) ** 2).sum(1).argmin() for row in private])


def test_the_nearest_text_is_the_exact_one(device: str) -> None:
    records, texts = near_ties(60, 48)
    search = on(device, texts)
    expected = nearest_exactly(records, texts)
    assert (search.nearest(records) == expected).all()
    assert search.gpu is not None
    by_float32 = search.index_U[search.gpu[0].search(records, 1)[1][:, 0]]
    assert (by_float32 != expected).any(), "no near-tie was decided wrongly: nothing was tested"


def seconds(device: str, records: int, texts: int, dimension: int) -> float:
    private = unit_vectors(records, dimension, 0)
    search = _NearestText(unit_vectors(texts, dimension, 1))
    if device == "cpu":
        search.gpu = None
    search.nearest(private[:1000])
    began = time.perf_counter()
    for start in range(0, records, 3000):
        search.nearest(private[start : start + 3000])
    return time.perf_counter() - began


@pytest.mark.gpu
@pytest.mark.slow
def test_votes_are_faster_on_the_gpu(gpu: str, show: Callable[[str], None]) -> None:
    size = (100_000, 5000, 384)
    on("cuda", unit_vectors(2, 8, 0))  # skips without FAISS
    host, there = seconds("cpu", *size), seconds("cuda", *size)
    show(f"{size[0]:,} votes for {size[1]:,} texts: {there:.2f} s; on the host {host:.2f} s")
    assert there < host
