"""Rules on logits: exact sums over a batch's private rows, draws, and the tokens that may be drawn.

**Sums over private rows** (Amin et al. 2024, Eq. 1 and 2; InvisibleInk 2025 for `dclip`).
`recentred_sum` and `dclip_sum` return `sum over rows of (something in [-c, c]^V)`. Adding or
removing one row therefore moves no component by more than `c`, whatever the number of rows. A
batch's average is this sum divided by the public expected batch size s, never by the number of
rows, plus, for `dclip`, public log-probabilities: sensitivity `c / s` in the infinity norm.

This holds to the last bit of the sum. A clipped row is rounded towards zero to a multiple of 2^-24,
at most c, by a rule on that row only: its maximum, differences, products with powers of two, and a
sum of whole numbers for its softmax (`row_steps`). Nothing in it depends on the order of a
reduction. Whole numbers below 2^53 are then added up in float64, which is exact and the same in
every order of the rows. So a batch may be cut into parts, whose sums are added, and the computation
into tiles, and none of it waits for the device.

**Rules on public logits** (`candidate_set`, `is_sure`, `CopyFilter`) decide which tokens may be
drawn, and which are drawn for free. They read the public prompt's logits and the tokens drawn so
far, so they cost nothing. That is exact only if no private row moves a bit of the public logits;
engines see to that (`dpray.engines.transformers.PublicPass`).
Proof: docs/privacy.md, sections 2.4 and 2.9.

A row that is not finite adds 0 to every sum. `highest_S` has the rows' highest logits, float32, and
NaN for such a row (`dpray.engines.finite_rows`).

Shapes: S private rows, V vocabulary, K candidates (a subset of the vocabulary chosen from public
logits only). Rows are clipped in float32 whatever the model's dtype; averages are float64.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from dpray.engines.finite_rows import highest
from dpray.extras import Late

# Imported late: a plan holds a mechanism and needs no torch.
if TYPE_CHECKING:
    import torch
else:
    torch = Late("torch")

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

CPU_TILE = 2**17
"""The logits that fit a core's cache."""

GPU_TILE = 2**24
"""The logits that occupy a GPU, and are a small part of its memory."""

TILE_ROWS = 64


# Sums over private rows


def recentred_sum(
    logits_SV: torch.Tensor,
    highest_S: torch.Tensor,
    candidates_K: torch.Tensor | None,
    clip_bound: float,
) -> torch.Tensor:
    """Return `sum_i clip_c(z_i)`, `clip_c(z)_j = max(-c, z_j - max_k z_k + c)` (Eq. 1), of shape
    (K,).

    Proof: docs/privacy.md, sections 2.1 and 2.2.
    """
    chosen_SK = columns_of(logits_SV, candidates_K)
    # As z - max z + c is at most c, Eq. 1 is a clamp to [-c, c], with a base of -c.
    lowest_K = highest_S.new_full((1,), -clip_bound).expand(chosen_SK.shape[-1])
    return _clipped_sum(chosen_SK, highest_S[:, None], lowest_K, clip_bound)


def dclip_sum(
    logits_SV: torch.Tensor,
    highest_S: torch.Tensor,
    logits_public_V: torch.Tensor,
    candidates_K: torch.Tensor | None,
    clip_bound: float,
) -> torch.Tensor:
    """Return `sum_i clamp(z_i - z_pub, -c, c)` on log-probabilities, of shape (K,).

    Logits carry an arbitrary constant per prompt; each row's is taken out by its own log-sum-exp,
    a rule on that row only.
    Proof: docs/privacy.md, sections 2.1 and 2.2.
    """
    public_K = log_probabilities(logits_public_V, candidates_K)
    top_S1 = highest_S[:, None]
    total_S1 = row_totals(logits_SV, top_S1)
    norm_S1 = (top_S1 + (total_S1 / EXP_GRID).log()).float()
    return _clipped_sum(columns_of(logits_SV, candidates_K), norm_S1, public_K, clip_bound)


def log_probabilities(
    logits_public_V: torch.Tensor, candidates_K: torch.Tensor | None
) -> torch.Tensor:
    """Return the public log-probabilities of the candidates, float32, of shape (K,)."""
    return columns_of(logits_public_V.float().log_softmax(dim=-1), candidates_K)


def _clipped_sum(
    logits_SK: torch.Tensor, shift_S1: torch.Tensor, base_K: torch.Tensor, clip_bound: float
) -> torch.Tensor:
    """Compute `sum_i clamp(z_i - shift_i - base, -c, c)` on the grid, float64, shape (K,)."""
    total_K = base_K.new_zeros(base_K.shape, dtype=torch.float64)
    most = _grid_bound(clip_bound)
    for rows, columns in tiles(logits_SK):
        steps = logits_SK[rows, columns].float() - shift_S1[rows]
        cut_to_grid_(steps.sub_(base_K[columns]), GRID).clamp_(-most, most)
        # A row that is not finite has the highest logit NaN: all of it is NaN, and counts as 0.
        total_K[columns] += steps.nansum(dim=0, dtype=torch.float64)
    return total_K / GRID


def probability_sum(logits_SV: torch.Tensor, highest_S: torch.Tensor) -> torch.Tensor:
    """Return `sum_i softmax(z_i)` in steps of `PROBABILITY_GRID`, float64, of shape (V,).

    A row's probabilities are rounded down to multiples of 2^-40, whose sum is 1 at most, and added
    up in float64: that is exact, whatever the order of the rows.
    """
    sum_V = logits_SV.new_zeros(logits_SV.shape[-1], dtype=torch.float64)
    for steps_RV, total_R1 in row_blocks(logits_SV, highest_S[:, None]):
        scale_R1 = (PROBABILITY_GRID * ROUNDING_ROOM / total_R1).float()
        for _, columns in tiles(steps_RV):
            probabilities = steps_RV[:, columns].mul_(scale_R1).floor_()
            sum_V[columns] += probabilities.nansum(dim=0, dtype=torch.float64)
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


def row_totals(logits_SV: torch.Tensor, top_S1: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row's `row_steps`, float64, of shape (S, 1). It is exact, so whatever
    shares the computation moves no bit of it."""
    total_S1 = top_S1.new_zeros(top_S1.shape, dtype=torch.float64)
    for rows, columns in tiles(logits_SV):
        steps = row_steps(logits_SV[rows, columns], top_S1[rows])
        total_S1[rows] += steps.sum(dim=-1, keepdim=True, dtype=torch.float64)
    return total_S1


def row_blocks(
    logits_SV: torch.Tensor, top_S1: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield, for `TILE_ROWS` rows at a time, their `row_steps` and the exact sums of these, of
    shapes (R, V) and (R, 1): an exponential is taken once, and what is kept of it is little."""
    for block_RV, top_R1 in zip(logits_SV.split(TILE_ROWS), top_S1.split(TILE_ROWS), strict=True):
        steps_RV = torch.empty_like(block_RV, dtype=torch.float32)
        total_R1 = top_R1.new_zeros(top_R1.shape, dtype=torch.float64)
        for _, columns in tiles(block_RV):
            steps = row_steps(block_RV[:, columns], top_R1)
            total_R1 += steps.sum(dim=-1, keepdim=True, dtype=torch.float64)
            steps_RV[:, columns] = steps
        yield steps_RV, total_R1


def row_steps(logits: torch.Tensor, top_S1: torch.Tensor) -> torch.Tensor:
    """Return `exp(z - top)` in whole steps of `EXP_GRID`, as float32: rows' softmaxes, but for
    their totals."""
    return cut_to_grid_((logits.float() - top_S1).exp_(), EXP_GRID)


def cut_to_grid_(values: torch.Tensor, grid: float) -> torch.Tensor:
    """Cut the values towards zero to whole steps of a grid, a power of two, in place."""
    # `trunc_` cuts one number after the other on a CPU and takes many times as long.
    return values.div_(1 / grid, rounding_mode="trunc")


def tiles(matrix: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and columns of the parts in which a matrix is worked on."""
    rows, columns = matrix.shape
    height = max(1, min(rows, TILE_ROWS))
    width = (CPU_TILE if matrix.is_cpu else GPU_TILE) // height
    for row in range(0, rows, height):
        for column in range(0, columns, width):
            yield slice(row, row + height), slice(column, column + width)


def _grid_bound(clip_bound: float) -> float:
    """Return the largest whole number of steps, exact in float32, that make at most c nats."""
    steps = math.floor(clip_bound * GRID)
    most = np.float32(steps)
    # As Python numbers: numpy would compare in float32, where the two are equal.
    return float(most if float(most) <= steps else np.nextafter(most, np.float32(0)))


def columns_of(rows: torch.Tensor, chosen_K: torch.Tensor | None) -> torch.Tensor:
    """Return the columns of the chosen tokens; None means all."""
    # On a CPU a quarter of what `rows[..., chosen_K]` takes.
    return rows if chosen_K is None else rows.index_select(-1, chosen_K)


# Draws


def sample_softmax(
    logits: torch.Tensor,
    temperature: float,
    rng: np.random.Generator,
    draws: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Draw once from `softmax(logits / temperature)`, or as often as the shape `draws` says;
    carries no guarantee by itself.

    The weights are cut to whole numbers that add up to less than 2^62, exactly and in any order, so
    that all ranks and devices agree; one uniform of 62 bits inverts their cumulative sum. Of V
    logits, 2^19 at most, a probability is off by at most 2^-59, a relative V 2^-60, and the
    rounding of its exponential. -inf entries are never drawn.
    Returns the index, a tensor without dimensions (or of the shape `draws`) on the logits' device,
    and does not wait for it; it is -1 if no entry is finite, or one is +inf or not a number.
    """
    scaled = logits.double() / temperature
    weights = (scaled - scaled.max()).exp_()
    # This sum is exact, and not below the weights' own: m 2^e with m < 1. So `scale`, the power of
    # two 2^(62 + 33 - e), rounds no weight, and takes their sum to at most m 2^62.
    total = (weights * 2.0**33).ceil_().sum()
    scale = total.frexp().mantissa / total * 2.0**95
    cumulative = (weights * scale).nan_to_num_(nan=0.0).long().cumsum(0)
    last = cumulative[-1]
    # last * uniform / 2^62, rounded down: by halves of both, because no integer has 124 bits.
    drawn = rng.integers(2**62, size=draws)
    uniform = int(drawn) if draws is None else torch.from_numpy(drawn).to(logits.device)
    high, low = uniform >> 31, uniform & (2**31 - 1)
    last_high, last_low = last >> 31, last & (2**31 - 1)
    middle = last_high * low + last_low * high + (last_low * low >> 31)
    mark = last_high * high + (middle >> 31)
    return torch.searchsorted(cumulative, mark, right=True).where(last > 0, -1)


# Rules on public logits


def even_if_not_finite(logits_public_V: torch.Tensor) -> torch.Tensor:
    """Return the public logits, or zeros if these are not finite, as after a token that a model
    overflows at. One of -inf becomes the lowest: it may be the only one that a schema allows, or
    that is no copy. There is a token to draw at every position: no draw decides that a text fails.
    """
    top = highest(logits_public_V)
    # 0 is added to all of them, or NaN. The lowest number is what `nan_to_num_` makes of -inf.
    return (logits_public_V + (top - top)).nan_to_num_(nan=0.0)


def candidate_set(
    logits_public_V: torch.Tensor, rule: Candidates, k: int, margin: float
) -> torch.Tensor | None:
    """Return the indices of the candidates, in ascending order; None means the whole vocabulary.

    `top_k`: the k highest public logits. `top_k_plus`: `{v : z_pub(v) >= l_k - margin}` with l_k
    the k-th highest and `margin = 2c/s`: by so much one clipped row can lift one token of the
    average against another (InvisibleInk 2025). A token whose public logit is -inf is a candidate
    only if fewer than k logits are finite.
    """
    if rule == "all":
        return None
    if k >= logits_public_V.numel():
        return (logits_public_V > -math.inf).nonzero().squeeze(-1)
    top = logits_public_V.float().topk(k)
    if rule == "top_k":
        return top.indices.sort().values
    return (logits_public_V.float() >= top.values[-1] - margin).nonzero().squeeze(-1)


def is_sure(logits_public_V: torch.Tensor, probability: float) -> torch.Tensor:
    """Return whether the public gate is open: the largest public probability is at least
    `probability`. The answer is a tensor without dimensions on the logits' device.

    A token drawn from the public logits while the gate is open costs nothing.
    """
    return logits_public_V.double().log_softmax(dim=-1).max().exp() >= probability


class CopyFilter:
    """Excludes every token after which more than `longest` tokens in a row would be the same as in
    the public prompt, or as before in the text."""

    def __init__(self, prompt: Sequence[int], longest: int) -> None:
        self._longest = longest
        self._last: tuple[int, ...] = ()
        self._next: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for token in prompt:
            self.add(token)
        self._last = ()  # a text begins again: the end of the prompt is no part of it

    def add(self, token: int) -> None:
        """Note the token that comes next in the text."""
        if len(self._last) == self._longest:
            self._next[self._last].add(token)
        self._last = (*self._last, token)[-self._longest :]

    @property
    def excluded(self) -> Collection[int]:
        """Return the tokens that may not come next."""
        return self._next.get(self._last, ())
