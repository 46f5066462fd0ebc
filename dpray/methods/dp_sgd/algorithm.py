"""DP-SGD (Abadi et al. 2016) fine-tunes a language model on texts with control codes (Yue et al.
2023).

The control code c stands before the text x and the model learns P(x | c) (section 3.2); afterwards
any number of texts is drawn from it with the wanted codes: post-processing, free. The paper's
settings: C = 1, an expected batch of 4096 units, 128 tokens, learning rate 1e-4 (Table 7).

Symbols: N the public number of units, q the sampling probability, B = q N the expected batch size,
C the clip norm, sigma the noise multiplier, t the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.event import Event
from dpray.methods.dp_sgd.training.settings import TrainingSettings
from dpray.methods.dp_sgd.training.step import DpSgdStep, Trainer, TrainingText, share

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Units(Protocol[T_co]):
    """The private data: the records of every unit, at least one each, by the unit's number."""

    def __len__(self) -> int: ...

    def __getitem__(self, unit: int, /) -> Sequence[T_co]: ...


MOST_ROWS = 16
"""The rows of a micro-batch if `micro_batch_size` is not set, at most. On a CPU more take more
memory and no less time."""

COIN_BITS = 53
"""A unit's coin is a whole number of this many random bits."""

COINS_AT_ONCE = 1 << 26
"""The number of fair coins that are tossed at once: 8 MiB."""


@dataclass(frozen=True)
class DpSgd:
    """The frozen plan of a fine-tuning; all of it is public.

    Guarantee: add or remove one unit. Every step is a `DpSgdStep` on a Poisson sample of its own,
    `steps` is fixed before the data is opened, and all that leaves a step is its noisy mean: the
    weights after any of them cost `dp_event` at most. Losses, norms and batch sizes are private.
    Proof: docs/privacy.md, section 5.4.
    """

    mechanism: DpSgdStep
    steps: int
    settings: TrainingSettings
    repeats: int = 0
    """The steps that are paid for in addition to `steps`: an interrupted training repeats its last
    ones, with noise of their own."""

    @property
    def most_rows(self) -> int:
        """Return the most texts of a micro-batch: public, too."""
        expected = math.ceil(self.mechanism.expected_batch_size)
        return self.settings.micro_batch_size or min(expected, MOST_ROWS)

    @property
    def fixed_rows(self) -> int:
        """Return the rows of a micro-batch where dummies have to fill it up: public, as they follow
        from B and not from a batch.

        With r rows a batch has about `B / r` micro-batches, each of which costs as much time as
        another row does, and the last one of each of some four lengths is half empty. The cost
        `B / r + 4 r / 2` is least at `sqrt(B / 2)`.
        """
        best = math.isqrt(int(self.mechanism.expected_batch_size) // 2)
        return self.settings.micro_batch_size or min(max(1, best), MOST_ROWS)

    @property
    def dp_event(self) -> Event:
        return SelfComposed(self.mechanism.dp_event, self.steps + self.repeats)


def fine_tune(
    plan: DpSgd,
    units: Units[TrainingText],
    trainer: Trainer,
    rng: np.random.Generator,
    before_step: Callable[[int], None] = lambda t: None,
    after_step: Callable[[int], bool] = lambda t: True,
    start: int = 0,
) -> None:
    """Run Algorithm 1 of Abadi et al. 2016 with Poisson sampling.

    Every rank runs it with the same `units` and the same draws of `rng`, a generator that nothing
    else draws from: so all know the whole batch, and each takes its share. `before_step` is called
    with t before anything of step t is drawn, `after_step` once the step is made, and if it returns
    False that step is the last one here. The steps before `start` are in the trainer's model
    already; `rng` is new nevertheless.
    """
    q, size = plan.mechanism.sampling_probability, plan.most_rows
    if not trainer.may_vary_rows(size):
        size = plan.fixed_rows
    for t in range(start, plan.steps):
        before_step(t)
        batch = one_record_each(units, poisson_batch(len(units), q, rng), rng)
        micro_batches = share(batch, size, trainer.rank, trainer.ranks)
        for number, (texts, positions) in enumerate(micro_batches, start=1):
            trainer.accumulate(texts, (size, positions), last=number == len(micro_batches))
        trainer.add_noise()
        trainer.update()
        if not after_step(t):
            return


def poisson_batch(units: int, q: float, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Draw the numbers of the units that join one step's batch, ascending; there may be none.

    This is the sampler that `PoissonSubsampledGaussian` charges for: shuffling, fixed batch sizes,
    or sampling each micro-batch by itself are other mechanisms with other costs.

    Claim: each unit joins with probability q, rounded down to a multiple of 2^-53 (no step costs
    more than it states), independently of the other units and of every other step. The number of
    units is drawn first, and then the set: given their number, every set is equally likely. Both
    are drawn in whole numbers, with nothing rounded.

    `rng` is a `dpray.mechanisms.randomness.generator` with a key of its own: nobody else draws from
    it, and its state is never stored, so that no step's batch can be drawn twice.
    Proof: docs/privacy.md, section 5.1.
    """
    if not 0 < q <= 1:
        raise ValueError(f"q is a probability above 0, got {q}")
    joining = binomial(units, math.floor(q * 2**COIN_BITS), rng)
    return np.sort(rng.choice(units, joining, replace=False, shuffle=False)).astype(np.int64)


def binomial(coins: int, threshold: int, rng: np.random.Generator) -> int:
    """Draw how many of `coins` independent numbers of `COIN_BITS` random bits are below
    `threshold`. All are compared with it at once, bit by bit from the highest on; only the number
    of those that agree with it so far is kept."""
    if threshold >> COIN_BITS:
        return coins
    below, undecided = 0, coins
    for bit in reversed(range(COIN_BITS)):
        ones = fair_coins(undecided, rng)
        if threshold >> bit & 1:
            below, undecided = below + undecided - ones, ones
        else:
            undecided -= ones
    return below


def fair_coins(coins: int, rng: np.random.Generator) -> int:
    """Draw how many fair coins show heads: the bits that are set in random words."""
    heads = 0
    for start in range(0, coins, COINS_AT_ONCE):
        number = min(COINS_AT_ONCE, coins - start)
        words = rng.integers(2**64, size=-(-number // 64), dtype=np.uint64)
        words[-1] >>= np.uint64(-number % 64)
        heads += int(np.bitwise_count(words).sum())
    return heads


def one_record_each(
    units: Units[T], batch: npt.NDArray[np.int64], rng: np.random.Generator
) -> list[T]:
    """Draw one record of every unit of the batch, uniformly from that unit's records.

    Claim: a unit brings one record to a step however many it has, so the guarantee is the unit's:
    adding or removing it changes a sum of vectors of norm at most C by at most C. The draw depends
    on that unit and `rng` only; a mixture over it is dominated by its worst member.
    Proof: docs/privacy.md, section 5.1.
    """
    drawn = (units[int(unit)] for unit in batch)
    return [records[int(rng.integers(len(records)))] for records in drawn]


@dataclass(frozen=True)
class TextEncoder:
    """Encodes records as token ids. `encode` maps any string to ids that the model has embeddings
    for, without special tokens, at least `max_length` if it has so many.

    Code and text are encoded apart, so that the prompt for a text is token for token the start of
    the training texts. A longer record is cut at `max_length`, a rule on that record only; `start`
    stands before the code, `eos` after a text that was not cut.
    """

    encode: Callable[[str], Sequence[int]]
    start: int
    eos: int
    max_length: int

    def training_text(self, code: str, text: str) -> TrainingText:
        prompt = (self.start, *self.encode(code))
        ids = (*prompt, *self.encode(text), self.eos)
        return TrainingText(ids[: self.max_length], min(len(prompt), self.max_length))
