"""`SparseVector` runs AboveThreshold on the distance of private and public predictions (Amin et al.
2024, Lemma 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dpray.accounting.events import AboveThreshold

if TYPE_CHECKING:
    import torch

PROBABILITY_GRID = 2.0**40
"""A probability has so many steps; a batch of 8,000 rows sums to less than 2^53 of them."""

ROUNDING_ROOM = 1 - 2.0**-22
"""More than two roundings to float32 can add, so that no row's probabilities sum to more than 1."""


@dataclass(frozen=True)
class SparseVector:
    """Says at each position whether the private rows are far from the public one.

    Claim: a query has sensitivity `sensitivity` (1/s, times the records of a unit); the threshold
    has noise Laplace(noise) and each query fresh noise Laplace(2 * noise), so everything said up
    to and including one "far" is `2 * sensitivity / noise`-DP (Dwork et al. 2009) and
    `2 * (sensitivity / noise)^2` zCDP; the "near"s before it are free. After a "far" a new
    threshold has to be drawn.
    Proof: docs/privacy.md, section 2.5.
    """

    threshold: float
    noise: float
    sensitivity: float

    @property
    def dp_event(self) -> AboveThreshold:
        """Return the cost up to and including one "far"."""
        return AboveThreshold(epsilon=2.0 * self.sensitivity / self.noise)

    def draw_threshold(self, rng: np.random.Generator) -> float:
        return self.threshold + float(rng.laplace(scale=self.noise))

    def is_far(self, distance: float, noisy_threshold: float, rng: np.random.Generator) -> bool:
        return distance + float(rng.laplace(scale=2.0 * self.noise)) >= noisy_threshold


def probability_sum(logits_SV: torch.Tensor) -> torch.Tensor:
    """Return `sum_i softmax(z_i)` in steps of `PROBABILITY_GRID`, float64, of shape (V,).

    A row's probabilities are rounded down to multiples of 2^-40, whose sum is 1 at most, and added
    up in float64: that is exact, whatever the order of the rows. A row whose logits are no
    distribution adds nothing.
    """
    # Imported late: a plan holds a `SparseVector` and needs no torch.
    import torch

    from dpray.methods.private_prediction.clipping import row_blocks, tiles

    sum_V = logits_SV.new_zeros(logits_SV.shape[-1], dtype=torch.float64)
    for steps_RV, total_R1 in row_blocks(logits_SV):
        scale_R1 = (PROBABILITY_GRID * ROUNDING_ROOM / total_R1).float()
        for _, columns in tiles(steps_RV):
            probabilities = steps_RV[:, columns].mul_(scale_R1).trunc_().nan_to_num_(nan=0.0)
            sum_V[columns] += probabilities.sum(dim=0, dtype=torch.float64)
    return sum_V


def distribution_distance(
    probability_sum_V: torch.Tensor, logits_public_V: torch.Tensor, batch_size: int
) -> torch.Tensor:
    """Return `|| (1/s) * sum_i softmax(z_i) - softmax(z_pub) ||_1` (Eq. 2), a tensor without
    dimensions on the logits' device.

    The mean of the softmaxes, of sensitivity 1/s; the softmax of the mean logits has no such bound.
    """
    mean_V = probability_sum_V / (PROBABILITY_GRID * batch_size)
    public_V = logits_public_V.double().softmax(dim=-1)
    return (mean_V - public_V).abs().sum()
