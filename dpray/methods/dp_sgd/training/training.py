"""`train` fine-tunes a base model to a model folder, in this process or on one of several ranks.

A step of DP-SGD is `accumulate`, `add_noise` and `update` of a trainer. The noise is added to what
the optimizer is about to use: whole parameters, or, under ZeRO, this rank's partition of them. Each
coordinate is in one optimizer's groups once, so it gets its noise once.

Floating-point caveat: normals are drawn in float64 and rounded to float32, and the clipped sum is
a float32 sum; the sampler is not the exact one of the theory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch.optim import SGD, AdamW, Optimizer

from dpray.mechanisms.randomness import generator, new_key
from dpray.methods.dp_sgd.algorithm import DpSgd, Units, fine_tune
from dpray.methods.dp_sgd.training.clipped_loss import Losses, MicroBatch, PerExampleLoss
from dpray.methods.dp_sgd.training.journal import Journal, TrainingState, shard_of
from dpray.methods.dp_sgd.training.model import check_norms, load_loss, put_weights, save_model
from dpray.methods.dp_sgd.training.rows import RowCheck
from dpray.methods.dp_sgd.training.settings import TrainingSettings
from dpray.methods.dp_sgd.training.step import DpSgdStep, TrainingText
from dpray.methods.dp_sgd.training.token_files import NOT_SHARED
from dpray.types import DprayError, InputError

NORMALS_AT_ONCE = 1 << 20
"""The number of normals that are drawn at once: 8 MiB."""

MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ()}
"""The moments that each optimizer keeps."""

OnStep = Callable[[int], None]

T = TypeVar("T")


class GradientNoise:
    """Adds a step's noise to gradients that are already divided by B.

    Claim: every coordinate that `add_` is given gets one normal of standard deviation
    `step.noise_std`, independent of all others. The caller hands over every coordinate once a
    step, and calls `check` at its end. Every rank has a key of its own.

    It cannot be pickled or copied: a state that was stored could draw the same noise again for
    another gradient, and the difference of the two would be in the open.
    Proof: docs/privacy.md, section 5.3.
    """

    def __init__(self, step: DpSgdStep, key: str) -> None:
        self.step = step
        self.coordinates = 0
        """The number of coordinates that have this step's noise. `check` sets it back to 0."""
        self._rng = generator(key)

    def add_(self, gradient: torch.Tensor) -> None:
        """Add noise in place, part by part; `gradient` is contiguous and float32."""
        if gradient.dtype != torch.float32:
            raise TypeError(f"noise is added in float32, the gradient is {gradient.dtype}")
        flat = gradient.detach().view(-1)
        self.coordinates += flat.numel()
        for start in range(0, flat.numel(), NORMALS_AT_ONCE):
            part = flat[start : start + NORMALS_AT_ONCE]
            normals = self._rng.standard_normal(part.numel())
            normals *= self.step.noise_std
            part += torch.from_numpy(normals).float().to(part.device)

    def add_to(self, optimizer: Optimizer) -> None:
        """Add noise to every gradient that the optimizer's next step uses."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:  # no micro-batch reached it
                    parameter.grad = torch.zeros_like(parameter)
                self.add_(parameter.grad)

    def check(self, coordinates: int) -> None:
        """End a step. Raises DprayError if fewer coordinates than these have their noise."""
        noisy, self.coordinates = self.coordinates, 0
        if noisy < coordinates:
            raise DprayError("the training made a step without noise; the run stops")

    def __reduce__(self) -> NoReturn:
        raise TypeError("the state of a noise generator is never stored")


class ReferenceTrainer:
    """A trainer in one process with plain torch; training on ranks is tested against it.
    `noise_key` is a `new_key()` of this attempt only."""

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
        self._trained = loss.trainable_parameters()
        self._moments = MOMENTS[settings.optimizer]
        kinds: dict[str, type[Optimizer]] = {"adamw": AdamW, "sgd": SGD}
        options: dict[str, Any] = {"lr": settings.rate, "weight_decay": 0.0}
        self._optimizer = kinds[settings.optimizer](list(self._trained.values()), **options)
        self._noise = GradientNoise(step, noise_key)
        self.row_check = RowCheck(self._loss, self._device)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, once all have called it."""
        return [value]

    def has_notice(self) -> bool:
        """Return whether a machine of a rank will be taken away soon. All ranks call it together,
        and get the same answer."""
        return False

    def forward(self, *batch: torch.Tensor) -> Losses:
        """Return the losses of a micro-batch's ids, mask and labels."""
        losses: Losses = self._loss(*batch)
        return losses

    def may_vary_rows(self, full: int) -> bool:
        return self.row_check.is_free(full)

    def accumulate(self, texts: Sequence[TrainingText], shape: tuple[int, int], last: bool) -> None:
        full, positions = shape
        rows = max(1, len(texts))
        if not self.row_check.is_alike(rows, full, positions):
            rows = full
        micro_batch = MicroBatch.of(texts, rows, positions).to(self._device)
        step = self._step
        share = 1.0 / step.expected_batch_size
        with self._loss.clipped(micro_batch, step.clip_norm, share) as clipped:
            clipped.backward()

    def add_noise(self) -> None:
        self._noise.add_to(self._optimizer)

    def update(self) -> None:
        self._noise.check(self._coordinates)
        self._optimizer.step()
        self._optimizer.zero_grad()

    @property
    def _coordinates(self) -> int:
        # DeepSpeed may keep a part of a parameter here, and its whole shape in `ds_shape`.
        shapes = (getattr(p, "ds_shape", p.shape) for p in self._trained.values())
        return sum(shape.numel() for shape in shapes)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the state that a training resumes from, on the CPU: each trained weight and each of
        its moments, once a step was made. All ranks take one after the other, together."""
        for name, parameter in self._trained.items():
            yield f"weights/{name}", self._weight(parameter).cpu()
        for kind in self._moments:
            for name, parameter in self._trained.items():
                yield f"{kind}/{name}", self._moment(parameter, kind).cpu()

    def restore(self, state: TrainingState) -> None:
        """Put the optimizer's moments back, this rank's part of them; the weights were in the model
        from the start, before an engine took it apart."""
        if not state.moments:
            return
        for tensor in self._stepped():
            zeros = {kind: torch.zeros_like(tensor, requires_grad=False) for kind in self._moments}
            self._optimizer.state[tensor] = {"step": torch.tensor(float(state.steps)), **zeros}
        self._mark_moments_initialised()
        for kind, moments in state.moments.items():
            for name, parameter in self._trained.items():
                self._put_moment(parameter, kind, moments[name].to(self._device))

    def _stepped(self) -> Sequence[torch.Tensor]:
        """Return the tensors that the optimizer steps."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _mark_moments_initialised(self) -> None:
        """Let an engine know that the optimizer has moments now."""

    def _weight(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.detach()

    def _moment(self, parameter: torch.Tensor, kind: str) -> torch.Tensor:
        moment: torch.Tensor = self._optimizer.state[parameter][kind]
        return moment

    def _put_moment(self, parameter: torch.Tensor, kind: str, moment: torch.Tensor) -> None:
        self._optimizer.state[parameter][kind].copy_(moment)


@dataclass(frozen=True)
class Training:
    """Everything that a rank needs. It is pickled and has no private data in it: a rank calls
    `read` with its trainer, and gets all units.

    `base` is the folder of the model that is tuned, and adapters call it `base_name`. Rank 0 writes
    the tuned model to `folder`, whose parent every rank has to see.
    """

    method: DpSgd
    read: Callable[[ReferenceTrainer], Units[TrainingText]] = field(repr=False)
    base: str
    base_name: str
    folder: str
    journal: Journal


AnyTrainer = TypeVar("AnyTrainer", bound=ReferenceTrainer)


def train(
    training: Training,
    make_trainer: Callable[[PerExampleLoss], AnyTrainer],
    sampling: np.random.Generator,
    on_step: OnStep = lambda t: None,
    loading: AbstractContextManager[object] = contextlib.nullcontext(),
) -> AnyTrainer:
    """Make the steps that are not made yet, write the model, and return the trainer. After a notice
    that a machine will be taken away, stop with a checkpoint after the step that is being made, so
    that no step is made again.

    `sampling` draws the same on all ranks, and never drew before; rank 0 calls `on_step` before
    each step; `loading` is that of `load_loss`. Raises InputError, before a step is made, if the
    parent of the model's folder is not here."""
    # Rank 0 may be on any node, in the next attempt on another one, so every rank checks. Found
    # after the first steps, this would cost what they were charged.
    if not Path(training.folder).parent.is_dir():
        raise InputError(NOT_SHARED)
    journal, method = training.journal, training.method
    trainer, start = _resumed(training, make_trainer, loading)
    first = start  # of the steps since the last checkpoint

    def before_step(t: int) -> None:
        if trainer.rank == 0:
            if t == first:
                journal.begin(t)
            on_step(t)

    def after_step(t: int) -> bool:
        nonlocal first
        goes_on = not trainer.has_notice()
        if journal.ends_block(t) or not goes_on:
            shard = shard_of(trainer.tensors(), trainer.rank, trainer.ranks)
            shards = trainer.gather(journal.write(first, trainer.rank, shard))
            if trainer.rank == 0:
                journal.publish(first, t, shards)
            first = t + 1
        return goes_on

    fine_tune(method, training.read(trainer), trainer, sampling, before_step, after_step, start)
    trainer.gather(None)  # the last checkpoint is published
    last = journal.latest(trainer.rank, trainer.ranks)
    trainer.gather(None)  # all of it is as it was published
    if trainer.rank == 0 and last is not None and last.steps == method.steps:
        # The checkpoint's weights are mapped from its files: no rank has to hold them all.
        folder = Path(training.folder)
        save_model(training.base, method.settings, last.weights, folder, training.base_name)
    return trainer


def _resumed(
    training: Training,
    make_trainer: Callable[[PerExampleLoss], AnyTrainer],
    loading: AbstractContextManager[object],
) -> tuple[AnyTrainer, int]:
    """Return the trainer as the last checkpoint left it, and the next step's number, from 0."""
    in_group = torch.distributed.is_initialized()
    here = (
        (torch.distributed.get_rank(), torch.distributed.get_world_size()) if in_group else (0, 1)
    )
    state = training.journal.latest(*here)
    loss = load_loss(training.base, training.method.settings, loading)
    if state is not None:
        put_weights(loss, state.weights)
    trainer = make_trainer(loss)
    check_norms(loss, trainer.forward)
    if state is None:
        return trainer, 0
    trainer.restore(state)
    return trainer, state.steps


def train_here(training: Training, on_step: OnStep) -> None:
    """Train in this process, on its GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def make_trainer(loss: PerExampleLoss) -> ReferenceTrainer:
        method = training.method
        return ReferenceTrainer(method.mechanism, method.settings, loss, new_key(), device)

    train(training, make_trainer, generator(new_key()), on_step)
    if device == "cuda":
        torch.cuda.empty_cache()  # the engine that writes the texts may want all of it
