"""A step of DP-SGD states its event, and its noise is added once."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from dpray.accounting.events import PoissonSubsampledGaussian
from dpray.mechanisms.randomness import new_key
from dpray.training import training
from dpray.training.step import DpSgdStep
from dpray.training.training import GradientNoise
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
    values = {
        "sampling_probability": 0.01,
        "noise_multiplier": 0.8,
        "clip_norm": 2.0,
        "expected_batch_size": 40.0,
    }
    with pytest.raises(ValueError):
        DpSgdStep(**(values | changes))


def test_noise_is_added_to_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "BLOCK", 7)
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
