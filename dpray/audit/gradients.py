"""Audits of DP-SGD: canaries with orthogonal gradients through the whole training loop.

The model is a table with one number for each canary, so that a canary's gradient lies on a
coordinate of its own, is longer than the clip norm, and what a step released of it is read off the
weights: the worst case of Nasr et al. (2021) and of Steinke et al. (2023, section 6, white box).
Sampling, per-example norms, clipping, noise and the optimizer's step are the code that trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from dpray.audit.monte_carlo import MonteCarlo, Scores
from dpray.audit.one_run import OneRun
from dpray.config.training import TrainingSettings
from dpray.mechanisms.randomness import generator, new_key
from dpray.methods.dp_sgd.algorithm import DpSgd, fine_tune
from dpray.training.batches import TrainingText
from dpray.training.clipped_loss import PerExampleLoss
from dpray.training.step import DpSgdStep, Trainer

MOST_STEPS = 1000
"""Of a training: what is claimed for so many is audited where the plan has more."""

TOO_LONG = 10.0
"""A canary's gradient before it is clipped, over the clip norm."""

Array = npt.NDArray[np.float64]
MakeTrainer = Callable[[DpSgd, PerExampleLoss], Trainer]


class CanaryTable(nn.Module):
    """Canary i is the text (i + 1, 0); its loss moves with the table's entry i + 1 alone."""

    def __init__(self, canaries: int, gradient: float) -> None:
        super().__init__()
        self.table = nn.Embedding(canaries + 1, 1)
        nn.init.zeros_(self.table.weight)
        self.register_buffer("scale", torch.tensor([gradient, -gradient]))

    def forward(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        # At 0 both of two tokens are as likely, and the loss falls by `gradient` a unit.
        return SimpleNamespace(logits=self.table(input_ids) * self.scale)


def canary(number: int) -> TrainingText:
    return TrainingText((number + 1, 0), given=1)


@dataclass
class Spy:
    """A `Trainer` that tells `see` what each step released of every canary, in units of a clipped
    gradient, and puts the weights back: every step begins at 0."""

    inner: Trainer
    loss: PerExampleLoss
    mechanism: DpSgdStep
    see: Callable[[Array], None]
    rank: int = 0
    ranks: int = 1

    def accumulate(self, texts: Sequence[TrainingText], shape: tuple[int, int], last: bool) -> None:
        self.inner.accumulate(texts, shape, last)

    def step(self, learning_rate: float) -> None:
        self.inner.step(learning_rate)
        table = self.loss.model
        assert isinstance(table, CanaryTable)
        weights = table.table.weight
        with torch.no_grad():
            moved = weights.detach().cpu().double().numpy()[1:, 0]
            self.see(moved * self.mechanism.expected_batch_size / self.mechanism.clip_norm)
            weights.zero_()


@dataclass
class Rehearsal:
    """A `Trainer` that only notes which canaries come at each step."""

    rank: int = 0
    ranks: int = 1
    batches: list[npt.NDArray[np.int64]] = field(default_factory=list)
    _batch: list[int] = field(default_factory=list)

    def accumulate(self, texts: Sequence[TrainingText], shape: tuple[int, int], last: bool) -> None:
        self._batch += [text.ids[0] - 1 for text in texts]

    def step(self, learning_rate: float) -> None:
        self.batches.append(np.array(self._batch, dtype=np.int64))
        self._batch = []


@dataclass(frozen=True)
class CanaryTraining:
    """The plan's training, of canaries, with plain SGD."""

    plan: DpSgd
    make_trainer: MakeTrainer

    def run(self, canaries: int, included: Sequence[int], see: Callable[[Array], None]) -> None:
        mechanism = self.plan.mechanism
        model = CanaryTable(canaries, TOO_LONG * mechanism.clip_norm)
        loss = PerExampleLoss(model, mechanism.precision).eval()
        spy = Spy(self.make_trainer(self.plan, loss), loss, mechanism, see)
        self._fine_tune(included, spy)

    def rehearse(self, canaries: int) -> list[npt.NDArray[np.int64]]:
        """The batches of another training: what the sampler lets everybody know beforehand."""
        rehearsal = Rehearsal()
        self._fine_tune(range(canaries), rehearsal)
        return rehearsal.batches

    def _fine_tune(self, included: Sequence[int], trainer: Trainer) -> None:
        units = [[canary(number)] for number in included]
        fine_tune(self.plan, units, trainer, generator(new_key()))

    def log_ratio(self, x_m: Array) -> Array:
        """Of one step's likelihood with the canary's unit in the data to that without (Abadi et al.
        2016): `log(1 - q + q e^((2x - 1) / (2 sigma^2)))`."""
        q, sigma = self.plan.mechanism.sampling_probability, self.plan.mechanism.noise_multiplier
        joined = np.log(q) + (2 * x_m - 1) / (2 * sigma**2)
        return joined if q == 1 else np.logaddexp(np.log1p(-q), joined)


def one_run_target(plan: DpSgd, make_trainer: MakeTrainer) -> OneRun:
    """One training; every canary is in the data by the toss of a coin."""
    training = _audited(plan, make_trainer)

    def draw(included: npt.NDArray[np.bool_]) -> Array:
        scores = np.zeros(len(included))

        def see(x_m: Array) -> None:
            scores[:] += training.log_ratio(x_m)

        training.run(len(included), np.flatnonzero(included).tolist(), see)
        return scores

    return OneRun(
        f"DP-SGD, {training.plan.steps} steps",
        "canaries with orthogonal gradients, each in the data by a coin",
        training.plan.dp_event,
        draw,
    )


def repeated_target(plan: DpSgd, make_trainer: MakeTrainer) -> MonteCarlo:
    """One canary in the data or not. A training with m canaries holds m trials of it: sampling and
    noise of one are drawn without regard to the others, which is taken for granted here, and by
    the one run is not.

    Statistics: the log-likelihood ratio, the sum, and the sum over the steps at which the canary
    came in a rehearsal, which tells something only where batches can be foretold.
    """
    training = _audited(plan, make_trainer)

    def draw(with_unit: bool, trials: int) -> Scores:
        foretold = training.rehearse(trials)
        scores = np.zeros((3, trials))
        step = 0

        def see(x_m: Array) -> None:
            nonlocal step
            scores[0] += training.log_ratio(x_m)
            scores[1] += x_m
            scores[2, foretold[step]] += x_m[foretold[step]]
            step += 1

        training.run(trials, range(trials) if with_unit else (), see)
        return scores

    return MonteCarlo(
        f"DP-SGD, {training.plan.steps} steps",
        "one more gradient, longer than the clip norm",
        training.plan.dp_event,
        draw,
        at_once=20_000,
    )


def _audited(plan: DpSgd, make_trainer: MakeTrainer) -> CanaryTraining:
    """Plain SGD at rate 1 shows the noisy mean itself: what an optimizer makes of it is free."""
    settings = TrainingSettings(optimizer="sgd", learning_rate=1.0, micro_batch_size=4096)
    audited = replace(plan, steps=min(plan.steps, MOST_STEPS), repeats=0, settings=settings)
    return CanaryTraining(audited, make_trainer)
