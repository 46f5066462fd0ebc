"""Faults that are injected into DP-SGD, and the plan that has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import numpy as np

from dpray.mechanisms.randomness import generator, new_key
from dpray.methods.dp_sgd import algorithm as dp_sgd
from dpray.methods.dp_sgd.algorithm import DpSgd
from dpray.methods.dp_sgd.training.clipped_loss import PerExampleLoss
from dpray.methods.dp_sgd.training.settings import TrainingSettings
from dpray.methods.dp_sgd.training.step import DpSgdStep
from dpray.methods.dp_sgd.training.training import GradientNoise
from tests.evaluation.prediction_faults import Fault

PLAN = DpSgd(
    DpSgdStep(sampling_probability=0.1, noise_multiplier=1.2, clip_norm=0.5,
              expected_batch_size=100.0),
    steps=40, settings=TrainingSettings(micro_batch_size=64, learning_rate=1e-3),
)  # fmt: skip


def unclipped_gradients() -> AbstractContextManager[Any]:
    right = PerExampleLoss.clipped

    def unclipped(self: PerExampleLoss, batch: Any, clip_norm: float, *more: Any) -> Any:
        return right(self, batch, 1e6, *more)

    return patch.object(PerExampleLoss, "clipped", unclipped)


def less_gradient_noise(times: int) -> Fault:
    right = DpSgdStep.noise_std.fget
    return lambda: patch.object(DpSgdStep, "noise_std", property(lambda self: right(self) / times))


@contextmanager
def noise_of_two_steps() -> Iterator[None]:
    """Draw the noise of every second step with the key of the step before."""
    right, steps, keys = GradientNoise.add_to, count(), [""]

    def add_to(self: GradientNoise, optimizer: Any) -> None:
        if next(steps) % 2 == 0:
            keys[0] = new_key()
        self._rng = generator(keys[0])
        right(self, optimizer)

    with patch.object(GradientNoise, "add_to", add_to):
        yield


def batches(next_batch: Callable[[int, int, np.random.Generator], Any]) -> Fault:
    """Replace `poisson_batch`; `next_batch` takes the step, the units' number and the generator."""

    @contextmanager
    def patched() -> Iterator[None]:
        steps: dict[int, int] = {}
        kept: list[np.random.Generator] = []  # so that no two share an id

        def sampler(units: int, q: float, rng: np.random.Generator) -> Any:
            if id(rng) not in steps:
                kept.append(rng)
            t = steps[id(rng)] = steps.get(id(rng), -1) + 1
            return next_batch(t, units, rng)

        with patch.object(dp_sgd, "poisson_batch", sampler):
            yield

    return patched


Q = PLAN.mechanism.sampling_probability


def fixed_shuffle(t: int, units: int, rng: np.random.Generator) -> Any:
    """Take one public permutation, the same in every epoch."""
    return np.sort(np.array_split(np.random.default_rng(0).permutation(units), 1 / Q)[t % 10])


def fixed_batch(t: int, units: int, rng: np.random.Generator) -> Any:
    return np.arange(round(units * Q))


_ORDERS: dict[int, Any] = {}


def secret_shuffle(t: int, units: int, rng: np.random.Generator) -> Any:
    """Take a new permutation every epoch, which nobody knows."""
    if t % 10 == 0:
        _ORDERS[id(rng)] = np.array_split(rng.permutation(units), 1 / Q)
    return np.sort(_ORDERS[id(rng)][t % 10])
