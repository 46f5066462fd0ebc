"""The search that a GPU makes, here on torch's CPU device: every vote is that of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from dpray.mechanisms import votes_on_device as there
from dpray.mechanisms.votes import count_votes
from dpray.mechanisms.votes_on_device import NearestOnDevice
from dpray.workers import shards
from tests.mechanisms.test_votes import clustered, matrix, population, rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class InFloat64(NearestOnDevice):
    is_exact = True

    def __init__(self, rows_ND: np.ndarray, device: str) -> None:
        super().__init__(rows_ND, device)
        self._is_exact = self.is_exact


class InFloat32(InFloat64):
    is_exact = False


WAYS = [InFloat64, InFloat32]


def votes_there(way: type[NearestOnDevice], private: np.ndarray, texts: np.ndarray) -> np.ndarray:
    return count_votes(private, texts, lambda rows: way(rows, DEVICE))


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=60)
@given(private=rows, texts=population)
def test_ties_duplicates_and_what_is_no_text(
    way: type[NearestOnDevice], private: list[np.ndarray], texts: list[np.ndarray]
) -> None:
    found = votes_there(way, matrix(private), matrix(texts))
    assert found.dtype == np.int64
    assert found.tolist() == count_votes(matrix(private), matrix(texts)).tolist()


def mixed(records: int, texts: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Ordinary vectors, and nearly equal ones whose distances float32 cannot tell apart; copies
    among the texts, and records that are in the middle of two texts."""
    rng = np.random.default_rng(seed)
    population = clustered(rng, texts)
    population[::3] = rng.standard_normal(population[::3].shape).astype(np.float32)
    population /= np.linalg.norm(population, axis=1, keepdims=True)
    population[1::7] = population[0]
    private = clustered(rng, records)
    private[::2] = rng.standard_normal(private[::2].shape).astype(np.float32)
    population[2], population[4] = np.eye(2, population.shape[1])
    private[::5] = (population[2] + population[4]) / 2
    return private, population


@pytest.mark.parametrize("way", WAYS)
def test_votes_are_those_of_the_host_in_any_blocks(
    way: type[NearestOnDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    private, texts = mixed(2_000, 60, seed=1)
    on_host = count_votes(private, texts)
    assert (votes_there(way, private, texts) == on_host).all()
    monkeypatch.setattr(there, "CELLS", 37 * len(texts))
    assert (votes_there(way, private, texts) == on_host).all()


def trusts_float32(search: InFloat32, norms: torch.Tensor) -> torch.Tensor:
    return norms.new_full(norms.shape, -1.0)


def takes_the_last_of_equal(search: InFloat64, steps_BD: torch.Tensor) -> torch.Tensor:
    order_BU = search._squares_U - 2.0 * (steps_BD.double() @ search._exact_UD.T)
    return order_BU.shape[1] - 1 - order_BU.flip(1).argmin(dim=1)


@pytest.mark.parametrize(
    ("way", "name", "fault"),
    [
        (InFloat32, "largest_rounding_gap", trusts_float32),
        (InFloat64, "_exactly_there", takes_the_last_of_equal),
    ],
)
def test_a_wrong_search_gives_other_votes(
    way: type[NearestOnDevice],
    name: str,
    fault: Callable[..., torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    private, texts = mixed(2_000, 60, seed=2)
    monkeypatch.setattr(way, name, fault)
    assert (votes_there(way, private, texts) != count_votes(private, texts)).any()


def test_the_host_searches_for_a_device_that_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a library that makes float64 products of float32 ones would."""
    private, texts = mixed(500, 50, seed=3)
    on_host = count_votes(private, texts)
    right = torch.addmm

    def rounds(squares: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float) -> Any:
        return right(squares, a.float().double(), b.float().double(), alpha=alpha).float().double()

    monkeypatch.setattr(torch, "addmm", rounds)
    assert (votes_there(InFloat64, private, texts) == on_host).all()
    monkeypatch.setattr(InFloat64, "_products_are_exact", lambda search: True)
    assert (votes_there(InFloat64, private, texts) != on_host).any()


@pytest.mark.parametrize("step", ["_put_there", "_products_are_exact", "_count_there"])
def test_the_host_searches_where_the_device_fails(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vote that fails is never held again: the run would be charged for nothing. cuBLAS has no
    class of its own for a full device."""
    private, texts = mixed(500, 50, seed=5)

    def fails(*arguments: object) -> None:
        raise RuntimeError("CUDA")

    monkeypatch.setattr(InFloat32, step, fails)
    assert (votes_there(InFloat32, private, texts) == count_votes(private, texts)).all()


def test_a_cuda_device_is_searched_there() -> None:
    assert shards._search_on("cpu") is None and shards._search_on("mps:0") is None
    search_of: Any = shards._search_on("cuda:0")
    assert search_of.func is NearestOnDevice and search_of.keywords == {"device": "cuda:0"}
