"""The two mechanisms of DP-KPS (Nagesh et al. 2025): a histogram of terms (B.1), and kernel
densities by random Fourier features (Theorem B.2, after Wagner et al. 2023).

The kernel is `k(x, y) = exp(-||x - y||^2 / bandwidth^2)`. Shape legend: R records, V terms of the
public list, N of the private one, D dimensions, I features, Q queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.event import Array, Event
from dpray.accounting.events import DiscreteLaplace, Gaussian
from dpray.mechanisms.discrete_noise import (
    MAX_SCALE,
    Counts,
    checked_scale,
    discrete_gaussian,
    discrete_laplace,
    laplace_scale,
)
from dpray.types import in_parts

# Features are truncated to multiples of 2^-24 and added up as integers. So the sums do not depend
# on the order of the records or on the shards, the sensitivity holds to the last bit, and exact
# integer noise can be added. An int64 holds the sums of 2^38 records.
GRID = 2.0**24
LARGEST = math.floor(math.sqrt(2) * GRID)

ROUNDING_STD = 3.0
"""The standard deviation, in steps of the grid, of the random rounding by which the proof of
`FeatureSum` turns Gaussian noise into discrete Gaussian noise."""

RECORDS_AT_ONCE = 4096


@dataclass(frozen=True)
class VocabularyHistogram:
    """Counts the records that hold each of the V terms of a public list, with noise on every count.

    Guarantee: add or remove one unit, of at most k = `records_per_unit` records. A record changes
    at most S counts, each by 1. So a unit changes no count by more than k, and all counts together
    by at most S * k in L1. All V counts get discrete Laplace noise of Laplace scale `scale`. The
    worst case is S counts that change by k each, which is S * k / scale-DP (Nagesh et al., B.1).
    Proof: docs/privacy.md, sections 4.1 and 6.8.

    Raises ValueError for a scale that integer noise cannot have.
    """

    size: int
    phrases_per_record: int
    scale: float
    records_per_unit: int = 1

    def __post_init__(self) -> None:
        checked_scale(self.scale)

    @property
    def dp_event(self) -> SelfComposed:
        """Return the cost of one call."""
        one_count = DiscreteLaplace(self.scale, self.records_per_unit)
        return SelfComposed(one_count, self.phrases_per_record)

    def count(self, terms_of_records: Iterable[Sequence[int]]) -> Counts:
        """Return the private counts of a shard of records, shape (V,). Only the first S distinct
        ids of a record are counted."""
        counts_V = np.zeros(self.size, dtype=np.int64)
        for term_ids in terms_of_records:
            counts_V[list(islice(dict.fromkeys(term_ids), self.phrases_per_record))] += 1
        return counts_V

    def __call__(self, counts_V: Counts) -> Counts:
        """Add the noise to the counts of all records. Returns counts that may be released."""
        if counts_V.shape != (self.size,):
            raise ValueError(f"counts have shape {counts_V.shape}, not ({self.size},)")
        return discrete_laplace(counts_V, self.scale)

    def top(self, noisy_V: Counts, number: int, rng: np.random.Generator) -> list[int]:
        """Return the ids of the `number` (N) highest noisy counts, highest first, ties broken at
        random; all V if there are no more."""
        order = np.lexsort((rng.random(self.size), -noisy_V))
        return [int(term_id) for term_id in order[:number]]

    def above_noise(self, noisy_V: Counts, rate: float) -> int:
        """Return the largest number k of highest noisy counts of which at most `rate` * k are
        expected to be noise alone: the rule of Benjamini and Hochberg (1995), with all V terms
        taken for absent. Post-processing.

        The noise Z of an absent term has P(Z >= y) = exp(-y / scale) / (1 + exp(-1 / scale)) for a
        whole number y above 0.
        """
        counts_K = np.sort(noisy_V[noisy_V > 0])[::-1].astype(np.float64)
        noise_K = self.size * np.exp(-counts_K / self.scale) / (1 + math.exp(-1 / self.scale))
        kept = np.flatnonzero(noise_K <= rate * np.arange(1, len(counts_K) + 1))
        return int(kept[-1]) + 1 if len(kept) else 0


@dataclass(frozen=True)
class FourierFeatures:
    """Computes `f_i(x) = sqrt(2) cos(sqrt(2) w_i.x / bandwidth + b_i)`, i = 1..I, with public draws
    of w_i ~ N(0, 1)^(blocks * D) and b_i ~ U[0, 2 pi]: E[f_i(x) f_i(y)] = k(x, y).

    A point is the concatenation of `blocks` vectors of dimension D; missing ones are zero. Vectors
    have norm 1 and are scaled here to squared norm `block_norm` (the paper's u).
    """

    dimension: int
    number: int
    bandwidth: float
    seed: int
    blocks: int = 1
    block_norm: float = 1.0

    def angles(self, vectors_ND: npt.NDArray[np.float32], block: int = 0) -> Array:
        """Return the terms that vectors in the given block contribute to the argument of each
        cosine, shape (N, I)."""
        w_DI, _ = _draws(self.seed, block, self.dimension, self.number)
        scale = math.sqrt(2 * self.block_norm) / self.bandwidth
        angles_NI: Array = np.asarray(vectors_ND, dtype=np.float64) @ w_DI
        angles_NI *= scale
        return angles_NI

    def of_angles(self, angles_RI: Array) -> Array:
        """Return the features of points from the sums of their blocks' angles, shape (R, I)."""
        features_RI = angles_RI + self.phases
        np.cos(features_RI, out=features_RI)
        features_RI *= math.sqrt(2)
        return features_RI

    def __call__(self, vectors_ND: npt.NDArray[np.float32]) -> Array:
        """Return the features of points of one block, shape (N, I)."""
        return self.of_angles(self.angles(vectors_ND))

    @property
    def phases(self) -> Array:
        """Return b, shape (I,)."""
        return _draws(self.seed, 0, self.dimension, self.number)[1]

    def padding_factor(self, length: int) -> float:
        """Return the factor that undoes the zero padding in the density at a point of l = `length`
        blocks: exp(u (L' - l)) at bandwidth 1 (Theorem B.2)."""
        return math.exp(self.block_norm * (self.blocks - length) / self.bandwidth**2)


@lru_cache(maxsize=32)
def _draws(seed: int, block: int, dimension: int, number: int) -> tuple[Array, Array]:
    w_DI = np.random.default_rng([seed, 0, block]).standard_normal((dimension, number))
    b_I = np.random.default_rng([seed, 1]).uniform(0, 2 * math.pi, number)
    return w_DI, b_I


@dataclass(frozen=True)
class FeatureSum:
    """Sums I features over the records, with exact integer noise on the grid of 2^-24.

    noise_multiplier: for Laplace noise, the Laplace scale over the L1 sensitivity, 1 / (pure
        epsilon); for Gaussian noise, the standard deviation over the L2 sensitivity.

    Guarantee: add or remove one unit, at most k = `records_per_unit` records. A record is one
    point, or the average of its points, so it changes each sum by at most `LARGEST` steps of the
    grid. A unit changes the sums by at most `LARGEST I k` steps in L1 and `LARGEST sqrt(I) k` in
    L2, which is `sqrt(2) I k` and `sqrt(2 I) k`. The sums are not divided by the private number of
    records. Densities are post-processing.

    Laplace noise is discrete Laplace noise; its event is that of I sums that change by `LARGEST k`
    steps each. Gaussian noise is discrete Gaussian noise of variance `s^2 + t^2`, with s the
    standard deviation of the event `Gaussian` and t = `ROUNDING_STD`. Up to an epsilon of 1e-75 I,
    this is the law of continuous noise that is rounded at random, and the rounding is
    post-processing (Peikert 2010).
    Proof: docs/privacy.md, sections 4.3, 4.4, 4.5 and 6.8.

    Raises ValueError for a multiplier that is not positive, and for noise that is too large for
    integer noise.
    """

    number: int
    noise: Literal["laplace", "gaussian"]
    noise_multiplier: float
    records_per_unit: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier must be positive, got {self.noise_multiplier!r}")
        if not self.grid_scale <= MAX_SCALE:
            raise ValueError(
                f"noise of scale {self.scale:.3g} on {self.number:,} features is too large for "
                f"integer noise, which ends at {MAX_SCALE / GRID:.3g}: take fewer features, or a "
                "larger epsilon"
            )

    @property
    def feature_sensitivity(self) -> int:
        """Return the sensitivity of one sum, in steps of the grid."""
        return LARGEST * self.records_per_unit

    @property
    def l2_sensitivity(self) -> float:
        """Return the L2 sensitivity in steps of the grid, rounded up."""
        return math.nextafter(self.feature_sensitivity * math.sqrt(self.number), math.inf)

    @property
    def dp_event(self) -> Event:
        if self.noise == "laplace":
            one_sum = DiscreteLaplace(self.grid_scale, self.feature_sensitivity)
            return SelfComposed(one_sum, self.number)
        return Gaussian(self.noise_multiplier)

    @property
    def grid_scale(self) -> float:
        """Return the Laplace scale, or the standard deviation of the Gaussian noise, in steps of
        the grid. It is rounded so that the noise costs no more than `noise_multiplier` states."""
        if self.noise == "laplace":
            epsilon = 1.0 / self.noise_multiplier
            return laplace_scale(self.feature_sensitivity, epsilon, count=self.number)
        noise_std = math.hypot(self.noise_multiplier * self.l2_sensitivity, ROUNDING_STD)
        # The factor makes up for all rounding errors, also if t^2 was lost in the sum.
        return noise_std * (1.0 + 2.0**-48)

    @property
    def scale(self) -> float:
        """Return `grid_scale` in the unit of the features."""
        return self.grid_scale / GRID

    def sum(self, features_of_records: Iterable[Array]) -> Counts:
        """Return the private sums over a shard, in steps of the grid, shape (I,). Each array has
        the features of R records, shape (R, I)."""
        total_I = np.zeros(self.number, dtype=np.int64)
        for part_RI in features_of_records:
            # Truncation never increases a value. Values that no point has are clipped, and NaN is
            # 0: as an integer it would be the smallest one.
            cut_RI = np.nan_to_num(np.trunc(part_RI * GRID), nan=0.0)
            np.clip(cut_RI, -LARGEST, LARGEST, out=cut_RI)
            total_I += cut_RI.astype(np.int64).sum(axis=0)
        return total_I

    def __call__(self, total_I: Counts) -> Array:
        """Add the noise to the sums over all records. Returns sums that may be released, in the
        unit of the features."""
        if total_I.shape != (self.number,):
            raise ValueError(f"sums have shape {total_I.shape}, not ({self.number},)")
        draw = discrete_laplace if self.noise == "laplace" else discrete_gaussian
        return draw(total_I, self.grid_scale) / GRID


def density(noisy_I: Array, features_QI: Array) -> Array:
    """Return `sum_i F_i g_i(y) / I` at queries y with features g: the kernel summed over the
    records, shape (Q,)."""
    return features_QI @ noisy_I / len(noisy_I)


def record_averages(
    features_NI: Array, terms_of_records: Iterable[Sequence[int]]
) -> Iterator[Array]:
    """Yield arrays of shape (R, I): the average of the features of each record's terms. A record
    without terms has no row."""
    for part in in_parts(filter(None, terms_of_records), RECORDS_AT_ONCE):
        lengths = np.array([len(terms) for terms in part])
        columns = np.concatenate([np.asarray(terms) for terms in part])
        starts = np.concatenate([[0], np.cumsum(lengths)])
        weights = np.repeat(1.0 / lengths, lengths)
        shape = (len(part), len(features_NI))
        yield csr_array((weights, columns, starts), shape=shape) @ features_NI


def record_prefixes(
    features: FourierFeatures,
    angles_LNI: Sequence[Array],
    terms_of_records: Iterable[Sequence[int]],
    shortest: int,
) -> Iterator[Array]:
    """Yield arrays of shape (R, I): the features of each record's first terms, concatenated and
    padded with zeros. `angles_LNI[j]` holds the terms' angles in block j. A record of fewer than
    `shortest` terms has no row."""
    long_enough = (terms for terms in terms_of_records if len(terms) >= shortest)
    for part in in_parts(long_enough, RECORDS_AT_ONCE):
        angles_RI = np.zeros((len(part), features.number))
        for position, angles_NI in enumerate(angles_LNI):
            rows = [row for row, terms in enumerate(part) if len(terms) > position]
            if rows:
                angles_RI[rows] += angles_NI[[part[row][position] for row in rows]]
        yield features.of_angles(angles_RI)
