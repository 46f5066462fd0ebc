"""This module averages clipped logits (Amin et al. 2024, Eq. 1; InvisibleInk 2025 for `dclip`).

Both return `(1/s) * sum over rows of (something in [-c, c]^V)`, plus, for `dclip`, public logits.
Adding or removing one row therefore moves no component by more than `c / s`: sensitivity `c / s` in
the infinity norm, whatever the number of rows that are there. `s` is the public expected batch
size, never the number of rows.

This holds to the last bit of the sum. A clipped row is rounded towards zero to a multiple of 2^-24,
at most c, by a rule on that row alone: rows are reduced in blocks of one shape, because the order
of a reduction goes with the shape. Integers below 2^53 are then added up in float64, which is exact
and the same in every order of the rows.

Shapes: S private rows, V vocabulary, K candidates (a subset of the vocabulary chosen from public
logits only). Rows are clipped in float32 whatever the model's dtype; averages are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch

GRID = 2.0**24
"""One nat of a clipped logit has so many steps."""

BLOCK = 16
"""So many rows are clipped together, whatever the number of rows."""


def recentred_mean(
    logits_SV: torch.Tensor, candidates_K: torch.Tensor | None, clip_bound: float, batch_size: int
) -> torch.Tensor:
    """Return `(1/s) * sum_i clip_c(z_i)`, `clip_c(z)_j = max(-c, z_j - max_k z_k + c)` (Eq. 1).

    Proof: docs/privacy.md, sections 2.1 and 2.2.
    """

    def clipped(rows_SV: torch.Tensor) -> torch.Tensor:
        top_S1 = rows_SV.amax(dim=-1, keepdim=True)
        return _chosen(rows_SV, candidates_K) - top_S1 + clip_bound

    return _grid_sum(logits_SV, candidates_K, clip_bound, clipped) / batch_size


def dclip_mean(
    logits_SV: torch.Tensor,
    logits_public_V: torch.Tensor,
    candidates_K: torch.Tensor | None,
    clip_bound: float,
    batch_size: int,
) -> torch.Tensor:
    """Return `z_pub + (1/s) * sum_i clamp(z_i - z_pub, -c, c)` on log-probabilities.

    Logits carry an arbitrary constant per prompt; each row's is taken out by its own log-sum-exp,
    a rule on that row alone.
    Proof: docs/privacy.md, sections 2.1 and 2.2.
    """
    public_K = _chosen(torch.log_softmax(logits_public_V.float(), dim=-1), candidates_K)

    def difference(rows_SV: torch.Tensor) -> torch.Tensor:
        norm_S1 = torch.logsumexp(rows_SV, dim=-1, keepdim=True)
        return _chosen(rows_SV, candidates_K) - norm_S1 - public_K

    total_K = _grid_sum(logits_SV, candidates_K, clip_bound, difference)
    return public_K.double() + total_K / batch_size


def row_blocks(logits_SV: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the rows in float32 in blocks of shape (BLOCK, V), the last filled up with zeros, each
    with the number of its true rows; nothing where there are no rows."""
    for start in range(0, len(logits_SV), BLOCK):
        rows_SV = logits_SV[start : start + BLOCK].float()
        count = len(rows_SV)
        yield torch.nn.functional.pad(rows_SV, (0, 0, 0, BLOCK - count)), count


def _grid_sum(
    logits_SV: torch.Tensor,
    candidates_K: torch.Tensor | None,
    clip_bound: float,
    value: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Compute the sum over rows of `value` clamped to [-c, c] on the grid, float64, shape (K,)."""
    total_K = _chosen(logits_SV.new_zeros(logits_SV.shape[-1], dtype=torch.float64), candidates_K)
    most = _grid_bound(clip_bound)
    for rows_SV, count in row_blocks(logits_SV):
        steps_SK = torch.trunc(value(rows_SV)[:count] * GRID).clamp_(-most, most)
        # A row may overflow in 16 bits; not a number, it would take the others' sum with it.
        steps_SK.nan_to_num_(nan=0.0)
        total_K += steps_SK.sum(dim=0, dtype=torch.float64)
    return total_K / GRID


def _grid_bound(clip_bound: float) -> float:
    """Return the largest whole number of steps, exact in float32, that make at most c nats."""
    steps = math.floor(clip_bound * GRID)
    most = np.float32(steps)
    # As Python numbers: numpy would compare in float32, where the two are equal.
    return float(most if float(most) <= steps else np.nextafter(most, np.float32(0)))


def _chosen(rows: torch.Tensor, candidates_K: torch.Tensor | None) -> torch.Tensor:
    return rows if candidates_K is None else rows[..., candidates_K]
