"""Rules on logits: exact sums over a step's private rows, draws, and the tokens that may be drawn.

**Sums over private rows** (Amin et al. 2024, Eq. 1 and 2; InvisibleInk 2025 for `dclip`).
`recentred_sums` and `dclip_sums` return, for each group of a step, `sum over its rows of (something
in [-c, c]^V)`. Adding or removing one row therefore moves no component of its group's sum by more
than `c`, whatever the number of rows, and no bit of another group's. A batch's average is this sum
divided by the public expected batch size s, never by the number of rows, plus, for `dclip`, public
log-probabilities: sensitivity `c / s` in the infinity norm.

This holds to the last bit of the sum. A clipped row is rounded towards zero to a multiple of 2^-24,
at most c, by a rule on that row only: its maximum, differences, products with powers of two, and a
sum of whole numbers for its softmax (`row_steps`). Nothing in it depends on the order of a
reduction. Whole numbers below 2^53 are then added up in float64, which is exact and the same in
every order of the rows. So a batch may be cut into parts, whose sums are added, the computation
into tiles, and groups may be computed together; none of it waits for the device.

**Rules on public logits** (`candidates`, `CopyFilter`) decide which tokens may be drawn. They read
the public prompt's logits and the tokens drawn so far, so they cost nothing. That is exact only if
no private row moves a bit of the public logits; engines see to that
(`dpray.engines.passes.PublicPass`). Public probabilities are exact functions of their row,
too: no other row of the step moves a bit of them.
Proof: docs/privacy.md, sections 2.2, 2.4 and 2.9.

A row that is not finite adds 0 to every sum. The rows' `highest` logits are float32, and NaN for
such a row (`dpray.engines.finite_rows`).

Shapes: G groups, N rows (of all groups), V vocabulary, K columns (a subset of the vocabulary chosen
from public logits only). Rows are clipped in float32 whatever the model's dtype; averages are
float64.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Literal

import numpy as np

from dpray.extras import torch

Candidates = Literal["all", "top_k", "top_k_plus"]
Clip = Literal["recentred", "dclip"]

GRID = 2.0**24
"""The steps of one nat of a clipped logit."""

EXP_GRID = 2.0**34
"""The steps of a row's highest weight; 2^19 tokens sum to at most 2^53 of them."""

PROBABILITY_GRID = 2.0**40
"""The steps of a probability of 1; a batch of 8,000 rows sums to less than 2^53 of them."""

ROUNDING_ROOM = 1 - 2.0**-22
"""More than two roundings to float32 can add, so that no row's probabilities sum to more than 1."""

HALF = 2**31 - 1
"""The lower half of a whole number below 2^62."""

CPU_TILE = 2**17
"""The logits that fit a core's cache."""

GPU_TILE = 2**24
"""The logits that occupy a GPU, and are a small part of its memory."""

TILE_ROWS = 64

Tiles = Iterator[tuple[slice, slice, "torch.Tensor"]]
"""Parts of a matrix: their rows, columns and numbers."""


# Sums over private rows


@dataclass(frozen=True, eq=False)
class Rows:
    """The private rows of a step: `logits` (N, V), their `highest` (N, 1), and the number of each
    row's `group` (N,), of `groups` in all. Without numbers all rows are finite and of one group."""

    logits: torch.Tensor
    highest: torch.Tensor
    group: torch.Tensor | None = None
    groups: int = 1

    @cached_property
    def into(self) -> torch.Tensor | None:
        """Return the group that each row is added to. The last one, which nobody reads, takes the
        rows that are not finite."""
        if self.group is None:
            return None
        return self.group.masked_fill(self.highest[:, 0].isnan(), self.groups)

    def sums(self, tiles: Tiles, grid: float) -> torch.Tensor:
        """Return each group's sums, float64, of shape (G, K), of the numbers of tiles, which are
        cut to whole steps of a grid in place, and given by rows, columns and their numbers."""
        size = (self.groups + (self.into is not None), self.logits.shape[1])
        total_GV = self.highest.new_zeros(size, dtype=torch.float64)
        for few, some, values in tiles:
            if self.into is None:
                steps = cut_to_grid_(values, grid)
                total_GV[0, some].add_(steps.sum(dim=0, dtype=torch.float64))
            else:
                steps = torch.empty_like(values, dtype=torch.float64)
                torch.div(values, 1 / grid, rounding_mode="trunc", out=steps)
                total_GV[:, some].index_add_(0, self.into[few], steps)
        return total_GV[: self.groups]


def recentred_sums(rows: Rows, columns_K: torch.Tensor | None, clip_bound: float) -> torch.Tensor:
    """Return `sum_i clip_c(z_i)`, `clip_c(z)_j = max(-c, z_j - max_k z_k + c)` (Eq. 1), of each
    group, in steps of `GRID`, of shape (G, K).

    Proof: docs/privacy.md, sections 2.1 and 2.2.
    """
    # As z - max z + c is at most c, Eq. 1 is a clamp to [-c, c], with a base of -c.
    return _clipped_sums(rows, rows.highest, -clip_bound, columns_K, clip_bound)


def dclip_sums(
    rows: Rows, log_public_GK: torch.Tensor, columns_K: torch.Tensor | None, clip_bound: float
) -> torch.Tensor:
    """Return `sum_i clamp(z_i - z_pub, -c, c)` on log-probabilities, of each group, in steps of
    `GRID`, of shape (G, K).

    Logits carry an arbitrary constant per prompt; each row's is taken out by its own log-sum-exp,
    a rule on that row only.
    Proof: docs/privacy.md, sections 2.1 and 2.2.
    """
    norm_N1 = log_norms(rows.highest, row_totals(rows.logits, rows.highest))
    return _clipped_sums(rows, norm_N1, log_public_GK, columns_K, clip_bound)


def log_norms(top_N1: torch.Tensor, total_N1: torch.Tensor) -> torch.Tensor:
    """Return the log-sum-exp of rows with these highest logits and `row_totals`, float32."""
    return torch.add(top_N1, (total_N1 / EXP_GRID).log(), out=torch.empty_like(top_N1))


def _clipped_sums(
    rows: Rows,
    shift_N1: torch.Tensor,
    base_GK: torch.Tensor | float,
    columns_K: torch.Tensor | None,
    clip_bound: float,
) -> torch.Tensor:
    """Compute `sum_i clamp(z_i - shift_i - base, -c, c)` on the grid."""
    if columns_K is not None:
        rows = replace(rows, logits=columns_of(rows.logits, columns_K))
    most = _grid_bound(clip_bound)

    def clipped() -> Tiles:
        for few, columns in blocks(rows.logits):
            for some in columns:
                base = base_GK if isinstance(base_GK, float) else base_GK[:, some]
                if isinstance(base, torch.Tensor) and rows.group is not None:
                    base = base.index_select(0, rows.group[few])
                above = (rows.logits[few, some] - shift_N1[few]).sub_(base)
                yield few, some, above.clamp_(-most, most)

    return rows.sums(clipped(), GRID)


def probability_sums(rows: Rows) -> torch.Tensor:
    """Return `sum_i softmax(z_i)` of each group in steps of `PROBABILITY_GRID`, float64, of shape
    (G, V).

    A row's probabilities are rounded down to multiples of 2^-40, whose sum is 1 at most, and added
    up in float64: that is exact, whatever the order of the rows.
    """

    def probabilities() -> Tiles:
        for few, parts, total_R1 in row_blocks(rows.logits, rows.highest):
            scale_R1 = torch.empty_like(total_R1, dtype=torch.float32)
            torch.mul(total_R1.reciprocal(), PROBABILITY_GRID * ROUNDING_ROOM, out=scale_R1)
            for some, steps in parts:
                yield few, some, steps.mul_(scale_R1)

    return rows.sums(probabilities(), 1.0)


def distribution_distances(
    probability_sums_GV: torch.Tensor, public_GV: torch.Tensor, batch_size: int
) -> torch.Tensor:
    """Return `|| (1/s) * sum_i softmax(z_i) - softmax(z_pub) ||_1` (Eq. 2) of each group, of shape
    (G, 1).

    The mean of the softmaxes, of sensitivity 1/s; the softmax of the mean logits has no such bound.
    The public softmax is cut to the grid of the sums, and the distance is one of whole numbers:
    its sensitivity is that of the sums to the last bit, and no other group moves a bit of it.
    """
    top_G1 = public_GV.amax(dim=-1, keepdim=True).float()
    steps_GV = row_steps(public_GV, top_G1)
    total_G1 = steps_GV.sum(dim=-1, keepdim=True, dtype=torch.float64)
    scale_G1 = PROBABILITY_GRID * batch_size / total_G1
    apart_GV = (steps_GV * scale_G1).floor_().sub_(probability_sums_GV).abs_()
    steps_G1 = apart_GV.sum(dim=-1, keepdim=True, dtype=torch.long)
    return steps_G1.double() / (PROBABILITY_GRID * batch_size)


def row_totals(logits_NV: torch.Tensor, top_N1: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row's `row_steps`, float64, of shape (N, 1). It is exact, so whatever
    shares the computation moves no bit of it."""
    found = []
    for few, columns in blocks(logits_NV):
        tiles_R = (row_steps(logits_NV[few, some], top_N1[few]) for some in columns)
        found.append(_row_sums(tiles_R))
    return concatenated(found)


def row_blocks(
    logits_NV: torch.Tensor, top_N1: torch.Tensor
) -> Iterator[tuple[slice, list[tuple[slice, torch.Tensor]], torch.Tensor]]:
    """Yield, for as many rows at a time as a tile has, the rows, their `row_steps` by columns, and
    the exact sums of these, of the shape (R, 1): an exponential is taken once, and what is kept of
    it is little."""
    for few, columns in blocks(logits_NV):
        parts = [(some, row_steps(logits_NV[few, some], top_N1[few])) for some in columns]
        yield few, parts, _row_sums(steps for _, steps in parts)


def _row_sums(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    sums = (steps.sum(dim=-1, keepdim=True, dtype=torch.float64) for steps in parts)
    return reduce(torch.add, sums)


def row_steps(logits: torch.Tensor, top_S1: torch.Tensor) -> torch.Tensor:
    """Return `exp(z - top)` in whole steps of `EXP_GRID`, as float32, as the highest logits are:
    rows' softmaxes, but for their totals."""
    return cut_to_grid_((logits - top_S1).exp_(), EXP_GRID)


def cut_to_grid_(values: torch.Tensor, grid: float) -> torch.Tensor:
    """Cut the values towards zero to whole steps of a grid, a power of two, in place."""
    # `trunc_` cuts one number after the other on a CPU and takes many times as long.
    return values.div_(1 / grid, rounding_mode="trunc")


def blocks(matrix: torch.Tensor) -> Iterator[tuple[slice, list[slice]]]:
    """Yield the parts in which a matrix is worked on: some rows, and the columns of all parts of
    these. There is a part even if there is no row. On a GPU a part is as wide as the matrix."""
    rows, columns = matrix.shape
    if matrix.is_cpu:
        height = max(1, min(rows, TILE_ROWS))
        width = CPU_TILE // height
    else:
        height, width = max(1, GPU_TILE // max(1, columns)), max(1, columns)
    for row in range(0, max(1, rows), height):
        some = [slice(column, column + width) for column in range(0, columns, width)]
        yield slice(row, row + height), some


def _grid_bound(clip_bound: float) -> float:
    """Return the most nats that are at most c, exact in float32, and a whole number of steps."""
    steps = math.floor(clip_bound * GRID)
    most = np.float32(steps)
    # As Python numbers: numpy would compare in float32, where the two are equal.
    most = most if float(most) <= steps else np.nextafter(most, np.float32(0))
    return float(most) / GRID


def concatenated(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def columns_of(rows: torch.Tensor, chosen_K: torch.Tensor | None) -> torch.Tensor:
    """Return the columns of the chosen tokens; None means all."""
    # On a CPU a quarter of what `rows[..., chosen_K]` takes.
    return rows if chosen_K is None else rows.index_select(-1, chosen_K)


# Draws


def halves(uniforms: np.ndarray) -> np.ndarray:
    """Return the upper and the lower 31 bits of whole numbers below 2^62, one after the other."""
    return np.array([uniforms >> 31, uniforms & HALF])


def sample_softmax(logits_GV: torch.Tensor, uniforms_2GD: torch.Tensor) -> torch.Tensor:
    """Draw from `softmax(logits)` of each group, once for each of its `uniforms`, which are the
    `halves` of whole numbers below 2^62; carries no guarantee by itself.

    The weights are cut to whole numbers that add up to less than 2^62, exactly and in any order, so
    that all ranks and devices agree, and no other group moves a bit; a uniform inverts their
    cumulative sum. Of V logits, 2^19 at most, a probability is off by at most 2^-59, a relative
    V 2^-60, and the rounding of its exponential. -inf entries are never drawn.
    Returns the indices, of the shape (G, D), and does not wait for them; they are V, one past the
    last, for a group of which no entry is finite, or one is +inf or not a number.
    """
    weights = (logits_GV - logits_GV.amax(dim=-1, keepdim=True)).exp_()
    # This sum is exact, and not below the weights' own: m 2^e with m < 1. So `scale`, the power of
    # two 2^(62 + 33 - e), rounds no weight, and takes their sum to at most m 2^62.
    total_G1 = (weights * 2.0**33).ceil_().sum(dim=-1, keepdim=True)
    scale_G1 = total_G1.frexp().mantissa / total_G1 * 2.0**95
    cumulative = weights.mul_(scale_G1).nan_to_num_(nan=0.0).long().cumsum(dim=-1)
    last_G1 = cumulative[:, -1:]
    # last * uniform / 2^62, rounded down: by halves of both, because no integer has 124 bits.
    high, low = uniforms_2GD
    last_high, last_low = last_G1 >> 31, last_G1 & HALF
    middle = (last_low * low >> 31).addcmul_(last_high, low).addcmul_(last_low, high)
    mark = (middle >> 31).addcmul_(last_high, high)
    return torch.searchsorted(cumulative, mark, right=True)


# Rules on public logits


def even_if_not_finite(public_GV: torch.Tensor) -> torch.Tensor:
    """Return the public logits, or zeros if these are not finite, as after a token that a model
    overflows at. One of -inf becomes the lowest: it may be the only one that a schema allows, or
    that is no copy. There is a token to draw at every position: no draw decides that a text fails.
    """
    top_G1 = public_GV.amax(dim=-1, keepdim=True)
    # 0 is added to all of them, or NaN. The lowest number is what `nan_to_num_` makes of -inf.
    return public_GV.add(top_G1, alpha=0).nan_to_num_(nan=0.0)


def candidates(public_GV: torch.Tensor, rule: Candidates, k: int, margin: float) -> torch.Tensor:
    """Return whether each token is a candidate, of shape (G, V).

    `top_k`: the k highest public logits, of equal ones the first. `top_k_plus`: `{v : z_pub(v) >=
    l_k - margin}` with l_k the k-th highest and `margin = 2c/s`: by so much one clipped row can
    lift one token of the average against another (InvisibleInk 2025). A token whose public logit is
    -inf is no candidate.
    """
    public_GV = public_GV.float()
    may_GV = public_GV > -math.inf
    if rule == "all" or k >= public_GV.shape[-1]:
        return may_GV
    lowest_G1 = public_GV.topk(k).values[..., -1:]
    if rule == "top_k_plus":
        return may_GV & (public_GV >= lowest_G1 - margin)
    above_GV, equal_GV = public_GV > lowest_G1, public_GV == lowest_G1
    left_G1 = k - above_GV.sum(dim=-1, keepdim=True)
    return may_GV & (above_GV | (equal_GV & (equal_GV.cumsum(dim=-1) <= left_G1)))


class CopyFilter:
    """Excludes every token after which more than `longest` tokens in a row would be the same as in
    the public prompt, or as before in the text, of which some tokens may be `written`."""

    def __init__(self, prompt: Sequence[int], longest: int, written: Sequence[int] = ()) -> None:
        self._longest = longest
        self._last: tuple[int, ...] = ()
        self._next: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for token in prompt:
            self.add(token)
        self._last = ()  # a text begins again: the end of the prompt is no part of it
        for token in written:
            self.add(token)

    def add(self, token: int) -> None:
        """Note the token that comes next in the text."""
        if len(self._last) == self._longest:
            self._next[self._last].add(token)
        self._last = (*self._last, token)[-self._longest :]

    @property
    def excluded(self) -> Collection[int]:
        """Return the tokens that may not come next."""
        return self._next.get(self._last, ())
