"""Private records vote for their nearest synthetic texts (Xie et al. 2024, step 3). Any public
vectors may take the place of texts, such as the centroids of topics.

A record's vote must depend on that record and the synthetic texts only. A float32 search does not
ensure that: the rounding of a matrix product depends on its number of rows. One more record could
flip a near-tie of ANOTHER record, and a unit would move more counts than is charged. So float32
decides only if rounding cannot matter, and near-ties are settled in exact arithmetic: embeddings
lie on a grid of 2^-24, and each squared distance is an integer below 2^53, which float64 holds
exactly, in any order of summation.

Shapes: M private records, N synthetic texts, D dimensions of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dpray.accounting.event import Array
from dpray.accounting.events import DiscreteGaussian
from dpray.mechanisms.discrete_noise import Counts, discrete_gaussian

GRID = 2.0**24
# Squared distances of vectors of at most this norm stay below 2^53 on the grid.
MAX_NORM = 2.0
LONGEST_SQUARE = (MAX_NORM * GRID) ** 2
# Cells of one distance matrix: 64 MiB in float32, and 32 MiB of exact ones in float64.
CELLS, EXACT_CELLS = 2**24, 2**22
FLOAT32_UNIT = 2.0**-24

NOISE_MULTIPLIERS = (1e-3, 1e7)
"""The range of noise multipliers: standard deviations over the sensitivity."""

N = TypeVar("N", bound=Any)
"""Numbers of numpy or of torch."""


@dataclass(frozen=True)
class VoteHistogram:
    """One vote: discrete Gaussian noise of standard deviation `noise_std` on every count.

    Guarantee: add or remove one unit. In an iteration each record votes for one text, which depends
    on that record and the public population only (`count_votes`). A unit casts at most k =
    `records_per_unit` votes, over the counts of all classes together, and all of them may fall on
    one text: the sensitivity is k, in L1 and in L2. Each iteration costs `dp_event`; its population
    depends on the iterations before (adaptive composition). Proof: docs/privacy.md, sections 3.2
    and 3.3.

    Raises ValueError unless `noise_std` is positive and finite: a run without noise does not use
    this mechanism.

    >>> vote = VoteHistogram(noise_std=4.0)
    >>> private = np.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]], dtype=np.float32)
    >>> exact = count_votes(private, np.eye(2, dtype=np.float32))  # private
    >>> exact
    array([2, 1])
    >>> noisy = vote(exact)  # may be released
    >>> vote.dp_event
    DiscreteGaussian(sigma=4.0, sensitivity=1)
    """

    noise_std: float
    records_per_unit: int = 1

    def __post_init__(self) -> None:
        _ = self.dp_event

    @property
    def dp_event(self) -> DiscreteGaussian:
        """Return the cost of one iteration."""
        return DiscreteGaussian(self.noise_std, self.records_per_unit)

    @property
    def noise_multiplier(self) -> float:
        """Return the standard deviation of the noise over the sensitivity."""
        return self.noise_std / self.records_per_unit

    def __call__(self, exact_N: npt.NDArray[np.integer]) -> Counts:
        """Add the noise to the exact votes of all private records, once. Returns votes that may be
        released, shape (N,), some of them perhaps negative."""
        return discrete_gaussian(exact_N, self.noise_std)


def count_votes(
    private_MD: npt.NDArray[np.float32],
    synthetic_ND: npt.NDArray[np.float32],
    search_of: Callable[[npt.NDArray[np.float32]], NearestText] | None = None,
) -> Counts:
    """Count the private records that are nearest, in L2, to each synthetic text, shape (N,).

    Private, not for release. Embeddings are rounded to multiples of 2^-24. Of equally near texts,
    duplicates included, the first gets the vote. A vector that is 0, not finite or longer than 2
    (embedders give norm 1) stands for no text: such a record casts no vote, a rule on that record,
    and such a synthetic text gets none. The votes of shards add up to the votes of all records.
    Memory grows with N, not with M. `search_of` makes the search among the texts, by default
    `NearestText`, on a GPU `dpray.mechanisms.votes_on_device.NearestOnDevice`: it moves no vote.
    Proof: docs/privacy.md, section 3.1.

    Raises ValueError for an empty synthetic set and for shapes that do not match.
    """
    if private_MD.ndim != 2 or synthetic_ND.ndim != 2:
        raise ValueError("embeddings have two dimensions: rows and vector components")
    if private_MD.shape[1] != synthetic_ND.shape[1]:
        raise ValueError(
            f"private embeddings have {private_MD.shape[1]} components, synthetic ones "
            f"{synthetic_ND.shape[1]}"
        )
    if not len(synthetic_ND):
        raise ValueError("there is no synthetic text to vote for")
    counts_N = np.zeros(len(synthetic_ND), dtype=np.int64)
    synthetic_ND, is_text_N = _on_grid(synthetic_ND)
    if not is_text_N.any():
        return counts_N
    search = (search_of or NearestText)(synthetic_ND[is_text_N])
    place_U = np.flatnonzero(is_text_N)[search.index_U]
    counts_N[place_U] = search.count(private_MD)
    return counts_N


class NearestText:
    """Finds exact nearest neighbours among the U distinct synthetic texts, which are on the grid,
    lowest index first. `index_U` has the texts' places."""

    def __init__(self, rows_ND: npt.NDArray[np.float32]) -> None:
        # One row for each distinct text: duplicates would make every vote for them a near-tie.
        _, first = np.unique(rows_ND, axis=0, return_index=True)
        self.index_U = np.sort(first)
        self.rows_UD = np.ascontiguousarray(rows_ND[self.index_U])
        self.exact_UD = self.rows_UD.astype(np.float64) * GRID
        self.squares_U = np.einsum("ud,ud->u", self.exact_UD, self.exact_UD)
        self.rounded_squares_U = (self.squares_U / GRID**2).astype(np.float32)
        self.largest_norm = float(_norms(self.rows_UD).max())

    def count(self, rows_MD: npt.NDArray[np.float32]) -> Counts:
        """Return how many of the rows, of any numbers, are nearest to each text, shape (U,)."""
        counts_U = np.zeros(len(self.index_U), dtype=np.int64)
        for rows_BD in in_parts(rows_MD, CELLS // len(self.index_U)):
            grid_BD, is_text_B = _on_grid(rows_BD)
            nearest_B = self._nearest(grid_BD[is_text_B])
            counts_U += np.bincount(nearest_B, minlength=len(self.index_U))
        return counts_U

    def _nearest(self, rows_BD: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        """Return the place among the U texts of each row's nearest one, shape (B,)."""
        if len(self.index_U) == 1:
            return np.zeros(len(rows_BD), dtype=np.int64)
        nearest_B, gap_B = self._in_float32(rows_BD)
        unsure = np.flatnonzero(gap_B <= self.largest_rounding_gap(_norms(rows_BD)))
        step = max(1, EXACT_CELLS // len(self.index_U))
        for start in range(0, len(unsure), step):
            part = unsure[start : start + step]
            nearest_B[part] = self._exactly(rows_BD[part])
        return nearest_B

    def _in_float32(self, rows_BD: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int64], Array]:
        """Return the nearest text in float32, and the gap between its squared distance and the
        second nearest text's."""
        order_BU = rows_BD @ self.rows_UD.T
        order_BU *= -2
        order_BU += self.rounded_squares_U
        rows_B, nearest_B = np.arange(len(rows_BD)), order_BU.argmin(axis=1)
        least_B = order_BU[rows_B, nearest_B].astype(np.float64)
        order_BU[rows_B, nearest_B] = np.inf
        return nearest_B, order_BU.min(axis=1) - least_B

    def largest_rounding_gap(self, norms_B: N) -> N:
        """Return the largest gap between two float32 squared distances that rounding alone can
        make, for rows of these norms, shape (B,). In any order of summation, each distance is off
        by at most gamma (|x| + |y|)^2, with gamma = n u / (1 - n u) for n roundings (Higham 2002,
        3.1)."""
        roundings = (self.rows_UD.shape[1] + 4) * FLOAT32_UNIT
        gamma = roundings / (1 - roundings)
        gaps_B: N = 2 * gamma * (norms_B + self.largest_norm) ** 2
        return gaps_B

    def _exactly(self, rows_BD: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        """Find the nearest exactly: |y|^2 - 2 x.y orders the texts as |x - y|^2 does; every sum in
        it is an integer below 2^53, so the product is exact and argmin takes the lowest index of a
        true tie."""
        exact_BD = rows_BD.astype(np.float64) * GRID
        order_BU = self.squares_U - 2.0 * (exact_BD @ self.exact_UD.T)
        nearest_B: npt.NDArray[np.int64] = order_BU.argmin(axis=1)
        return nearest_B


def in_parts(rows_MD: npt.NDArray[np.float32], size: int) -> Iterator[npt.NDArray[np.float32]]:
    """Yield so many rows at a time, at least one."""
    size = max(1, size)
    for start in range(0, len(rows_MD), size):
        yield rows_MD[start : start + size]


def _on_grid(
    rows_BD: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Round to multiples of 2^-24, which float32 holds exactly for components up to 2. Also return
    which rows are vectors of a text, shape (B,): of a norm above 0 and up to 2."""
    with np.errstate(all="ignore"):  # numbers that are not finite, or not so rounded
        # Adding 0 turns -0 into 0: equal rows have equal bytes.
        grid_BD = np.rint(np.asarray(rows_BD, np.float32) * np.float32(GRID)) + np.float32(0)
        # Exact up to the bound, so that every device finds the same rows.
        squares_B = np.square(grid_BD, dtype=np.float64).sum(axis=1)
        grid_BD /= np.float32(GRID)
        return np.ascontiguousarray(grid_BD), (squares_B > 0) & (squares_B <= LONGEST_SQUARE)


def _norms(rows_BD: npt.NDArray[np.float32]) -> Array:
    norms_B: Array = np.linalg.norm(rows_BD.astype(np.float64), axis=1)
    return norms_B
