"""`train` fine-tunes a base model to a model folder, in this process or on one of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from dpray.config.training import TrainingSettings
from dpray.training.clipped_loss import PerExampleLoss
from dpray.training.journal import Journal
from dpray.training.model import load_loss, save_model
from dpray.training.state import TrainingState
from dpray.training.step import DpSgdStep, Trainer
from dpray.types import InputError

OnStep = Callable[[int], None]
Loop = Callable[[Trainer, np.random.Generator, OnStep, OnStep, int], None]
"""Makes the steps from a first one on: `loop(trainer, sampling, before_step, after_step, start)`.
Every rank calls it with the same draws of `sampling`; it calls the callbacks with each step's
number, from 0."""


@dataclass(frozen=True)
class Training:
    """Holds everything that a rank needs. It is pickled and holds no private data: `loop` reads
    that on the rank.

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


class ResumableTrainer(Trainer, Protocol):
    """Gives its state and takes it back; every method is called on every rank."""

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the trained weights by name, on the CPU."""

    def state(self, steps: int) -> TrainingState:
        """Return the state after `steps` steps, one of them made by this trainer."""

    def restore(self, state: TrainingState) -> None:
        """Put the optimizer's moments back; the weights were in the model from the start."""


def train(
    training: Training,
    make_trainer: Callable[[PerExampleLoss], ResumableTrainer],
    sampling: np.random.Generator,
    on_step: OnStep = lambda t: None,
) -> None:
    """Make the steps that are not made yet, and write the model. `sampling` draws the same on all
    ranks, and never drew before; rank 0 calls `on_step` before each step. Raises InputError, before
    a step is made, where the parent of the model's folder is not here."""
    # Rank 0 may be on any node, in the next attempt on another one, so every rank checks. Found
    # after the first steps, this would cost what they were charged.
    if not Path(training.folder).parent.is_dir():
        raise InputError(
            "output.path: a rank of the training does not see this folder; put it on a disk that "
            "all nodes share"
        )
    journal = training.journal
    state = journal.latest()
    loss = load_loss(training.base, training.settings)
    if state is not None:
        state.put_weights(loss)
    trainer = make_trainer(loss)
    if state is not None:
        trainer.restore(state)

    def before_step(t: int) -> None:
        if trainer.rank == 0:
            journal.before_step(t)
            on_step(t)

    def after_step(t: int) -> None:
        if journal.ends_block(t):
            reached = trainer.state(t + 1)
            if trainer.rank == 0:
                journal.keep(t, reached)

    start = 0 if state is None else state.steps
    training.loop(trainer, sampling, before_step, after_step, start)
    weights = trainer.weights()
    if trainer.rank == 0:
        folder = Path(training.folder)
        save_model(training.base, training.settings, weights, folder, training.base_name)
