"""`train` fine-tunes a base model to a model folder, in this process or on one of several ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from dpray.mechanisms.randomness import generator, new_key
from dpray.training.clipped_loss import MicroBatch, PerExampleLoss
from dpray.training.gradient_noise import (
    GradientNoise,
    add_noise,
    make_optimizer,
    set_learning_rate,
)
from dpray.training.journal import MOMENTS, Journal, TrainingState, empty_moments
from dpray.training.model import load_loss, save_model
from dpray.training.partitions import shape_of
from dpray.training.settings import TrainingSettings
from dpray.training.step import DpSgdStep, TrainingText
from dpray.types import InputError

OnStep = Callable[[int], None]
Loop = Callable[["ReferenceTrainer", np.random.Generator, OnStep, OnStep, int], None]
"""Makes the steps from a first one on: `loop(trainer, sampling, before_step, after_step, start)`.
Every rank calls it with the same draws of `sampling`; it calls the callbacks with each step's
number, from 0."""


@dataclass(frozen=True)
class Training:
    """Everything that a rank needs. It is pickled and has no private data in it: `loop` reads that
    on the rank.

    `base` is the folder of the model that is tuned, and adapters call it `base_name`. Rank 0 writes
    the tuned model to `folder`, whose parent every rank has to see.
    """

    step: DpSgdStep
    settings: TrainingSettings
    base: str
    base_name: str
    loop: Loop = field(repr=False)
    folder: str
    journal: Journal


class ReferenceTrainer:
    """A trainer in one process with plain torch; training on ranks is tested against it.
    `noise_key` is a `new_key()` of this attempt alone."""

    rank = 0
    ranks = 1

    def __init__(
        self,
        step: DpSgdStep,
        settings: TrainingSettings,
        loss: PerExampleLoss,
        noise_key: str,
        device: str | torch.device = "cpu",
    ) -> None:
        self._step, self._device = step, torch.device(device)
        self._loss = loss.to(self._device)
        self._moments = MOMENTS[settings.optimizer]
        self._optimizer = make_optimizer(settings, loss)
        self._noise = GradientNoise(step, noise_key)
        trained = loss.trainable_parameters().values()
        self._coordinates = sum(shape_of(parameter).numel() for parameter in trained)

    def wait_for_ranks(self) -> None:
        """Return once all ranks have called it."""

    def accumulate(self, texts: Sequence[TrainingText], shape: tuple[int, int], last: bool) -> None:
        micro_batch = MicroBatch.of(texts, *shape).to(self._device)
        step = self._step
        share = 1.0 / step.expected_batch_size
        with self._loss.clipped(micro_batch, step.clip_norm, share) as clipped:
            clipped.backward()

    def add_noise(self) -> None:
        add_noise(self._optimizer, self._noise)

    def update(self, learning_rate: float) -> None:
        self._noise.check(self._coordinates)
        set_learning_rate(self._optimizer, learning_rate)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of `tensors`, in their order."""
        named = self._loss.trainable_parameters()
        kinds = ("weights", *self._moments)
        return {f"{kind}/{name}": shape_of(p) for kind in kinds for name, p in named.items()}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the state that a training resumes from, on the CPU: each trained weight and each of
        its moments, once a step was made. All ranks take one after the other, together."""
        for name, parameter in self._loss.trainable_parameters().items():
            yield f"weights/{name}", self._weight(parameter).cpu()
        for kind in self._moments:
            for name, parameter in self._loss.trainable_parameters().items():
                yield f"{kind}/{name}", self._moment(parameter, kind).cpu()

    def restore(self, state: TrainingState) -> None:
        """Put the optimizer's moments back, this rank's part of them; the weights were in the model
        from the start, before an engine took it apart."""
        if not state.moments:
            return
        self._empty_moments(state.steps)
        for kind, moments in state.moments.items():
            for name, parameter in self._loss.trainable_parameters().items():
                self._put_moment(parameter, kind, moments[name].to(self._device))

    def _empty_moments(self, steps: int) -> None:
        empty_moments(self._optimizer, self._loss.trainable_parameters().values(), steps)

    def _weight(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.detach()

    def _moment(self, parameter: torch.Tensor, kind: str) -> torch.Tensor:
        return self._optimizer.state[parameter][kind]

    def _put_moment(self, parameter: torch.Tensor, kind: str, moment: torch.Tensor) -> None:
        self._optimizer.state[parameter][kind].copy_(moment)


AnyTrainer = TypeVar("AnyTrainer", bound=ReferenceTrainer)


def train(
    training: Training,
    make_trainer: Callable[[PerExampleLoss], AnyTrainer],
    sampling: np.random.Generator,
    on_step: OnStep = lambda t: None,
    loading: AbstractContextManager[Any] = contextlib.nullcontext(),
) -> AnyTrainer:
    """Make the steps that are not made yet, write the model, and return the trainer. `sampling`
    draws the same on all ranks, and never drew before; rank 0 calls `on_step` before each step;
    `loading` is that of `load_loss`. Raises InputError, before a step is made, where the parent of
    the model's folder is not here."""
    # Rank 0 may be on any node, in the next attempt on another one, so every rank checks. Found
    # after the first steps, this would cost what they were charged.
    if not Path(training.folder).parent.is_dir():
        raise InputError(
            "output.path: a rank of the training does not see this folder; put it on a disk that "
            "all nodes share"
        )
    journal = training.journal
    trainer, start = _resumed(training, make_trainer, loading)

    def before_step(t: int) -> None:
        if trainer.rank == 0:
            journal.before_step(t)
            on_step(t)

    def after_step(t: int) -> None:
        if journal.ends_block(t):
            if trainer.rank == 0:
                journal.keep(t, trainer.shapes(), trainer.tensors())
            else:
                for _ in trainer.tensors():
                    pass

    training.loop(trainer, sampling, before_step, after_step, start)
    if trainer.rank == 0 and (last := journal.latest()) is not None:
        # The checkpoint's weights are mapped from its file: no rank has to hold them all.
        folder = Path(training.folder)
        save_model(training.base, training.settings, last.weights, folder, training.base_name)
    return trainer


def _resumed(
    training: Training,
    make_trainer: Callable[[PerExampleLoss], AnyTrainer],
    loading: AbstractContextManager[Any],
) -> tuple[AnyTrainer, int]:
    """Return the trainer as the last checkpoint left it, and the next step's number, from 0."""
    state = training.journal.latest()
    loss = load_loss(training.base, training.settings, loading)
    if state is None:
        return make_trainer(loss), 0
    state.put_weights(loss)
    trainer = make_trainer(loss)
    trainer.restore(state)
    return trainer, state.steps


def train_here(training: Training, on_step: OnStep) -> None:
    """Train in this process, on its GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def make_trainer(loss: PerExampleLoss) -> ReferenceTrainer:
        return ReferenceTrainer(training.step, training.settings, loss, new_key(), device)

    train(training, make_trainer, generator(new_key()), on_step)
    if device == "cuda":
        torch.cuda.empty_cache()  # the engine that writes the texts may want all of it
