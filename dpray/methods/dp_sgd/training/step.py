"""`DpSgdStep` is one step of DP-SGD as a mechanism; a `Trainer` makes it with its share of a batch
of texts, in micro-batches of fixed shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dpray.accounting.events import PoissonSubsampledGaussian

SUM_ROUNDING = (
    "the rounding of float32 sums over a batch: whether one text is there moves the sum of all "
    "others' clipped gradients a little, in addition to its own part within the clip norm C (by "
    "4e-6 C in 512 texts with a tiny model on a CPU; it grows with the batch and was not measured "
    "on a GPU)"
)
"""A limit of DP-SGD, in the words of the report; docs/benchmarks.md has figures."""


@dataclass(frozen=True)
class DpSgdStep:
    """Releases `(sum of clipped gradients + N(0, (sigma C)^2 I)) / B` of a Poisson sample.

    Guarantee: relation add-or-remove-one unit. Each unit joins with probability q and brings one
    vector of L2 norm at most C, so the sum has sensitivity C; `dp_event` is the cost of the step.
    B, the expected batch size q * N, is a public number: nothing is divided by the size of the
    batch that was drawn, and an empty batch releases noise like any other.

    Proof: docs/privacy.md, sections 5.2 and 5.3.
    """

    sampling_probability: float
    noise_multiplier: float
    clip_norm: float
    expected_batch_size: float

    def __post_init__(self) -> None:
        for name in ("clip_norm", "expected_batch_size"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is a positive number")
        _ = self.dp_event  # raises ValueError for a q or a sigma that is out of range

    @property
    def dp_event(self) -> PoissonSubsampledGaussian:
        return PoissonSubsampledGaussian(self.sampling_probability, self.noise_multiplier)

    @property
    def noise_std(self) -> float:
        """Return the standard deviation of a coordinate of the noisy mean, sigma * C / B."""
        return self.noise_multiplier * self.clip_norm / self.expected_batch_size


class Trainer(Protocol):
    """A model, or this rank's part of one, that makes `DpSgdStep`s."""

    rank: int
    ranks: int

    def may_vary_rows(self, full: int) -> bool:
        """Return whether a micro-batch may have fewer than `full` rows without padding."""

    def accumulate(self, texts: Sequence[TrainingText], shape: tuple[int, int], last: bool) -> None:
        """Add the clipped gradients of a micro-batch to this step's sum. Every text is computed as
        it is among `shape` (rows, positions); `last` marks the step's last micro-batch."""

    def add_noise(self) -> None:
        """Add the step's noise to the sum, which is divided by B already: one normal for each
        coordinate."""

    def update(self) -> None:
        """Let the optimizer make its step with the noisy mean; the sum is 0 afterwards. Raises
        DprayError if a coordinate has no noise."""


@dataclass(frozen=True)
class TrainingText:
    """A record's token ids. The loss is over `ids[given:]`, its own tokens."""

    ids: Sequence[int] | npt.NDArray[np.int32] = field(repr=False)
    given: int


def share(
    batch: Sequence[TrainingText], size: int, rank: int, ranks: int
) -> list[tuple[Sequence[TrainingText], int]]:
    """Return a rank's micro-batches of at most `size` texts, each with the number of positions that
    it is padded to. All ranks get the same number of micro-batches, at least one, so that they meet
    in the same collective calls; some are empty.

    A micro-batch has texts that are padded to one length (`padded_length`). That follows from a
    text only: it is computed in the same shape, whatever the rest of the batch.
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
    Every text has some padding: one without it would change the kernel of attention for its whole
    micro-batch."""
    power = 4
    while power < tokens:
        power *= 2
    return (power * 3 // 4 if tokens <= power * 3 // 4 and power > 4 else power) + 1
