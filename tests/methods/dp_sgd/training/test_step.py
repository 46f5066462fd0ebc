"""A step of DP-SGD: its event, its noise, which is added once, and its batch, which ranks share."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpray.accounting.events import PoissonSubsampledGaussian
from dpray.mechanisms.randomness import new_key
from dpray.methods.dp_sgd.algorithm import DpSgd
from dpray.methods.dp_sgd.training import training
from dpray.methods.dp_sgd.training.settings import TrainingSettings
from dpray.methods.dp_sgd.training.step import DpSgdStep, TrainingText, padded_length, share
from dpray.methods.dp_sgd.training.training import GradientNoise
from dpray.types import DprayError

STEP = DpSgdStep(
    sampling_probability=0.01, noise_multiplier=0.8, clip_norm=2.0, expected_batch_size=40.0
)


def test_the_event_is_of_the_numbers_that_run() -> None:
    assert STEP.dp_event == PoissonSubsampledGaussian(0.01, 0.8)
    assert STEP.noise_std == pytest.approx(0.8 * 2.0 / 40.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling_probability": 0.0},
        {"sampling_probability": 1.1},
        {"noise_multiplier": 0.0},
        {"clip_norm": 0.0},
        {"clip_norm": float("inf")},
        {"expected_batch_size": -1.0},
        {"expected_batch_size": float("nan")},
    ],
)
def test_numbers_that_make_no_mechanism_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        replace(STEP, **changes)


def test_noise_is_added_to_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "NORMALS_AT_ONCE", 7)
    key = new_key()
    bare, shifted = torch.zeros(5, 6), torch.full((5, 6), 3.0)
    GradientNoise(STEP, key).add_(bare)
    GradientNoise(STEP, key).add_(shifted)
    assert (bare != 0).all() and torch.allclose(bare + 3.0, shifted)


def test_coordinates_are_counted() -> None:
    noise = GradientNoise(STEP, new_key())
    noise.add_(torch.zeros(5, 6))
    noise.add_(torch.zeros(4))
    noise.check(34)
    noise.add_(torch.zeros(33))
    with pytest.raises(DprayError, match="without noise"):
        noise.check(34)


def test_gradients_of_low_precision_are_refused() -> None:
    with pytest.raises(TypeError):
        GradientNoise(STEP, new_key()).add_(torch.zeros(3, dtype=torch.bfloat16))


@pytest.mark.parametrize("store", [pickle.dumps, copy.copy, copy.deepcopy])
def test_the_state_cannot_be_stored(store: Any) -> None:
    with pytest.raises(TypeError, match="never stored"):
        store(GradientNoise(STEP, new_key()))


def test_texts_of_a_length_go_together() -> None:
    batch = [TrainingText((1,) * length, 0) for length in (2, 9, 3, 8, 2, 9, 3, 8)]
    assert [(len(texts), n) for texts, n in share(batch, 2, 0, 1)] == [
        (2, 5), (2, 5), (2, 9), (2, 13),
    ]  # fmt: skip


def test_a_text_is_padded_by_its_own_length_alone() -> None:
    assert [padded_length(n) for n in (0, 1, 4, 5, 6, 7, 8, 9, 12, 13)] == [
        5, 5, 5, 7, 7, 9, 9, 13, 13, 17,
    ]  # fmt: skip
    assert [padded_length(n) for n in (64, 65, 96, 97, 128, 1024)] == [65, 97, 97, 129, 129, 1025]
    assert all(n < padded_length(n) <= max(5, 3 * n // 2 + 1) for n in range(1, 3000))


@pytest.mark.parametrize(
    ("expected", "longest", "free", "most"), [(32, 128, True, 1.02), (256, 48, False, 1.15)]
)
def test_our_shapes_compute_little_more_than_ragged_ones(
    expected: int, longest: int, free: bool, most: float
) -> None:
    """Ragged are 16 texts in the order of the batch, as long as the longest of them. The lengths
    are like those of news in AG News."""
    rng = np.random.default_rng(0)
    plan = DpSgd(replace(STEP, expected_batch_size=float(expected)), 1, TrainingSettings())
    size, filled, ragged = plan.most_rows if free else plan.fixed_rows, 0, 0
    for _ in range(50):
        lengths = np.exp(rng.normal(3.89, 0.27, rng.poisson(expected))).clip(5, longest).astype(int)
        batch = [TrainingText((1,) * length, 0) for length in lengths.tolist()]
        parts = share(batch, size, 0, 1)
        filled += sum((len(texts) if free else size) * positions for texts, positions in parts)
        slices = [lengths[start : start + 16] for start in range(0, len(lengths), 16)]
        ragged += sum(len(each) * int(each.max()) for each in slices)
    assert filled < most * ragged


@given(size=st.integers(1, 5), ranks=st.integers(1, 5), count=st.integers(0, 40))
def test_shares_are_equally_many_and_hold_every_text_once(
    size: int, ranks: int, count: int
) -> None:
    batch = [TrainingText((i,) * (i % 11 + 1), 0) for i in range(count)]
    shares = [share(batch, size, rank, ranks) for rank in range(ranks)]
    assert len({len(of_rank) for of_rank in shares}) == 1 and len(shares[0]) >= 1
    assert all(len(micro) <= size for of_rank in shares for micro, _ in of_rank)
    assert all(
        positions == padded_length(len(text.ids))
        for of_rank in shares
        for micro, positions in of_rank
        for text in micro
    )
    held = [text.ids[0] for of_rank in shares for micro, _ in of_rank for text in micro]
    assert sorted(held) == list(range(count))
