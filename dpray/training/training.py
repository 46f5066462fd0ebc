"""A fine-tuning from its plan to a model folder, in this process or on one of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from dpray.mechanisms.randomness import generator, new_key
from dpray.methods.dp_sgd.algorithm import DpSgd, Trainer, Units, fine_tune
from dpray.training.clipped_loss import PerExampleLoss
from dpray.training.journal import Journal, nothing
from dpray.training.model import Tuning, load_loss, save_model
from dpray.training.reference import ReferenceTrainer
from dpray.training.state import TrainingState
from dpray.types import InputError


@dataclass(frozen=True)
class Training:
    """What every rank is told; it is pickled, and holds no private data.

    `load_units` gives the private data, the same on every rank, in the same order. Rank 0 writes
    the model to `folder`, whose parent every rank has to see. Without a `journal` nothing is
    noted, and a training that is cut off is lost.
    """

    plan: DpSgd
    tuning: Tuning
    zero_stage: int
    load_units: Callable[[], Units] = field(repr=False)
    folder: str
    journal: Journal | None = None


class ResumableTrainer(Trainer, Protocol):
    """To be called on every rank."""

    def weights(self) -> dict[str, torch.Tensor]: ...

    def state(self, steps: int) -> TrainingState: ...

    def restore(self, state: TrainingState) -> None:
        """The optimizer's part of `state`; the weights were in the model from the start."""


def train(
    training: Training,
    make_trainer: Callable[[PerExampleLoss], ResumableTrainer],
    sampling: np.random.Generator,
) -> None:
    """Make the steps that are not made yet, and write the model. `sampling` draws the same on all
    ranks, and never drew before. Raises InputError, before a step is made, where the parent of the
    model's folder is not here."""
    # Rank 0 may be on any node, in the next attempt on another one: all of them are asked. Found
    # after the first steps, this would cost what they were charged.
    if not Path(training.folder).parent.is_dir():
        raise InputError(
            "output.path: a rank of the training does not see this folder; put it on a disk that "
            "all nodes share"
        )
    journal = training.journal
    state = None if journal is None else journal.latest()
    loss = load_loss(training.tuning)
    if state is not None:
        state.put_weights(loss)
    trainer = make_trainer(loss)
    if state is not None:
        trainer.restore(state)

    def after_step(t: int) -> None:
        if journal is not None and journal.blocks.ends(t):
            reached = trainer.state(t + 1)
            if trainer.rank == 0:
                journal.keep(t, reached)

    fine_tune(
        training.plan,
        training.load_units(),
        trainer,
        sampling,
        nothing if journal is None or trainer.rank != 0 else journal.before_step,
        after_step,
        start=0 if state is None else state.steps,
    )
    weights = trainer.weights()
    if trainer.rank == 0:
        save_model(training.tuning, weights, Path(training.folder))


def train_here(training: Training) -> None:
    """In this process, on its GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def make_trainer(loss: PerExampleLoss) -> ReferenceTrainer:
        return ReferenceTrainer(training.plan, loss, new_key(), device)

    train(training, make_trainer, generator(new_key()))
    if device == "cuda":
        torch.cuda.empty_cache()  # what writes the texts then may want all of it
