"""Poisson sampling of the logical batch of DP-SGD (Abadi et al. 2016; Yue et al. 2023, 2.2).

The sampler that runs is the sampler that `PoissonSubsampledGaussian` charges for: shuffling, fixed
batch sizes, or sampling each micro-batch by itself are other mechanisms with other costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")


def poisson_batch(units: int, q: float, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return the numbers of the units that join one step's batch, ascending; there may be none.

    Claim: each unit joins with probability q (to within 2^-53), independently of the other units
    and of every other step. `rng` is a `dpray.mechanisms.randomness.generator` with a key of its
    own: nobody else draws from it, and its state is never stored, so that no step's batch can be
    drawn twice.
    """
    if not 0 < q <= 1:
        raise ValueError(f"q is a probability above 0, got {q}")
    return np.flatnonzero(rng.random(units) < q).astype(np.int64)


def one_record_each(
    units: Sequence[Sequence[T]], batch: npt.NDArray[np.int64], rng: np.random.Generator
) -> list[T]:
    """Draw one record of every unit of the batch, uniformly from that unit's records.

    Claim: a unit brings one record to a step however many it has, so adding or removing a unit
    changes a sum of vectors of norm at most C by at most C, and the guarantee is the unit's: no
    factor for its number of records. Which record is drawn depends on that unit and `rng` alone; a
    mixture over it is dominated by its worst member.
    """
    records = (units[int(unit)] for unit in batch)
    return [of_unit[int(rng.integers(len(of_unit)))] for of_unit in records]
