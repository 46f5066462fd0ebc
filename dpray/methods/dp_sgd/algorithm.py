"""Fine-tuning a language model with DP-SGD on texts with control codes (Yue et al. 2023).

The control code c stands before the text x and the model learns P(x | c) (section 3.2); afterwards
any number of texts is drawn from it with the wanted codes: post-processing, free. The paper's
settings: C = 1, an expected batch of 4096 units, 128 tokens, learning rate 1e-4 (Table 7).

Symbols: N the public number of units, q the sampling probability, B = q N the expected batch size,
C the clip norm, sigma the noise multiplier, t the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from dpray.accounting.events import Event, SelfComposed
from dpray.methods.dp_sgd.poisson import one_record_each, poisson_batch
from dpray.training.clipped_loss import MicroBatch, TrainingText
from dpray.training.gradient_noise import DpSgdStep

Units = Sequence[Sequence[TrainingText]]
"""The private data: the records of every unit, at least one each."""


@dataclass(frozen=True)
class DpSgd:
    """The frozen plan of a fine-tuning, all of it public.

    Guarantee: add or remove one unit. Every step is a `DpSgdStep` on a Poisson sample of its own,
    `steps` is fixed before the data is opened, and all that leaves a step is its noisy mean: the
    weights after any of them cost `dp_event` at most. Losses, norms and batch sizes are private.

    `micro_batch_size` (and the number of ranks) says how a batch is taken apart; it changes the
    sum in the last bits only. Micro-batches have fixed shapes: an example's own gradient does not
    depend on who else is in the batch, in bfloat16 either (`share`).
    """

    mechanism: DpSgdStep
    steps: int
    micro_batch_size: int
    learning_rate: float
    schedule: Literal["constant", "linear"] = "constant"
    optimizer: Literal["adamw", "sgd"] = "adamw"
    weight_decay: float = 0.0
    repeats: int = 0
    """Steps that are paid for beside `steps`: those of a training that was cut off are made again,
    with noise of their own, and both times count."""

    @property
    def dp_event(self) -> Event:
        return SelfComposed(self.mechanism.dp_event, self.steps + self.repeats)

    def learning_rate_at(self, t: int) -> float:
        """Return the rate of step t, counted from 0; `linear` falls to 0 after the last one."""
        left = 1.0 - t / self.steps if self.schedule == "linear" else 1.0
        return self.learning_rate * left


class Trainer(Protocol):
    """Holds a model, or this rank's part of one."""

    rank: int
    ranks: int

    def accumulate(self, micro_batch: MicroBatch, last: bool) -> None:
        """Add the clipped gradients of a micro-batch to this step's sum; `last`: of this step."""

    def step(self, learning_rate: float) -> None:
        """Divide the sum by B, add the noise, once for each coordinate, and let the optimizer make
        its step; the next sum begins at 0."""


def fine_tune(
    plan: DpSgd,
    units: Units,
    trainer: Trainer,
    rng: np.random.Generator,
    before_step: Callable[[int], None] = lambda t: None,
    after_step: Callable[[int], None] = lambda t: None,
    start: int = 0,
) -> None:
    """Run Algorithm 1 of Abadi et al. 2016 with Poisson sampling.

    Every rank runs it with the same `units` and the same draws of `rng`, a generator that nothing
    else draws from: so all know the whole batch, and each takes its share. `before_step` is told t
    before anything of step t is drawn, `after_step` once it is made. The steps before `start` are
    in the trainer's model already; `rng` is new nevertheless.
    """
    q = plan.mechanism.sampling_probability
    for t in range(start, plan.steps):
        before_step(t)
        batch = one_record_each(units, poisson_batch(len(units), q, rng), rng)
        shares = share(batch, plan.micro_batch_size, trainer.rank, trainer.ranks)
        for number, (texts, positions) in enumerate(shares, start=1):
            micro_batch = MicroBatch.of(texts, plan.micro_batch_size, positions)
            trainer.accumulate(micro_batch, last=number == len(shares))
        trainer.step(plan.learning_rate_at(t))
        after_step(t)


def share(
    batch: Sequence[TrainingText], size: int, rank: int, ranks: int
) -> list[tuple[Sequence[TrainingText], int]]:
    """Return a rank's micro-batches of at most `size` texts, and the positions that each is padded
    to: as many on every rank, and at least one, so that all meet in the same collective calls; some
    are empty.

    Texts go through the model together where they are padded to the same number of positions, which
    depends on a text alone (`padded_length`). With dummies in the rows that are left, every text is
    computed in a shape of its own, whoever else is in the batch.
    """
    groups: dict[int, list[TrainingText]] = {}
    for text in batch:
        groups.setdefault(padded_length(len(text.ids)), []).append(text)
    parts: list[tuple[Sequence[TrainingText], int]] = [
        (texts[start : start + size], positions)
        for positions, texts in sorted(groups.items())
        for start in range(0, len(texts), size)
    ]
    count = max(1, -(-len(parts) // ranks))
    parts += [((), padded_length(1))] * (count * ranks - len(parts))
    return parts[rank::ranks]


def padded_length(tokens: int) -> int:
    """Return one more than the least of 4, 6, 8, 12, 16, 24, 32, ... that is not below `tokens`.

    There is always some padding: without any, attention takes another kernel, and would so for all
    texts of a micro-batch by what its other texts are.
    """
    power = 4
    while power < tokens:
        power *= 2
    return (power * 3 // 4 if tokens <= power * 3 // 4 and power > 4 else power) + 1


def control_code(columns: Mapping[str, str]) -> str:
    """Return what stands before a text: `Business Type: Restaurants | Review Stars: 5.0` and a
    newline; "" without columns."""
    code = " | ".join(f"{name}: {value}" for name, value in columns.items())
    return f"{code}\n" if code else ""


@dataclass(frozen=True)
class TextEncoder:
    """Turns records into token ids. `encode` maps a string to ids without special tokens.

    The code and the text are encoded apart, so that what the model is given when it writes is
    token for token what it was trained on. A record longer than `max_length` tokens is cut there, a
    rule on that record alone; `eos` follows a text that was not.
    """

    encode: Callable[[str], Sequence[int]]
    eos: int
    max_length: int
    bos: int | None = None

    def prompt(self, code: str) -> tuple[int, ...]:
        """Return what the model continues."""
        start = self.eos if self.bos is None else self.bos
        return (start, *self.encode(code))

    def training_text(self, code: str, text: str) -> TrainingText:
        prompt = self.prompt(code)
        ids = (*prompt, *self.encode(text), self.eos)
        return TrainingText(ids[: self.max_length], min(len(prompt), self.max_length))
