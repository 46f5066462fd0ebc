"""Noisy histograms of pairs of columns, and the shares of combinations of values that fit them.

As in MST and AIM (McKenna, Miklau and Sheldon 2021 and 2022), margins of a table are measured with
Gaussian noise, and a joint distribution is estimated from them. Every pair is measured, so that
nothing has to be chosen from the records: for up to six columns that costs no more than choosing
a tree of pairs in private and measuring its pairs and the columns.

Shapes: N counts of all histograms, D columns; a table has an axis for each column.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import log, prod, sqrt

import numpy as np
import numpy.typing as npt

from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.events import DiscreteGaussian
from dpray.mechanisms.discrete_noise import Counts, checked_scale, discrete_gaussian
from dpray.types import ReadOnlyJson

Values = tuple[tuple[str, str], ...]
"""Values of several columns: each column's name with its value."""

Table = npt.NDArray[np.float64]

STEPS = 1000

NOISE_LEFT = 0.8
"""A fit ends at this part of the squares that the noise adds: a closer one fits the noise."""


@dataclass(frozen=True)
class PairHistograms:
    """Counts records by the values of every pair of columns, with discrete Gaussian noise of
    standard deviation `noise_std` on every count; a single column is counted by itself.

    Guarantee: add or remove one unit, of at most k = `records_per_unit` records. A record adds one
    to at most one count of each histogram, so a unit changes each histogram by at most k in L1, and
    so in L2. Every count of the public `domains` gets noise, those without a record too. A
    histogram costs `DiscreteGaussian(noise_std, k)`, and all of them together `dp_event`.
    Proof: docs/privacy.md, section 1.8.

    `label` is the column of the labels, if there is one.

    Raises ValueError for no columns, an empty or ambiguous domain, and a bad noise or unit size.

    >>> pairs = PairHistograms({"kind": ("a", "b"), "stars": ("1", "5")}, noise_std=1e-3)
    >>> exact = pairs.count([{"kind": "a", "stars": "1"}] * 3 + [{"kind": "b", "stars": "5"}])
    >>> exact  # private
    array([3, 0, 0, 1])
    >>> shares = pairs.shares(pairs(exact))  # may be released
    >>> round(shares[("kind", "a"), ("stars", "1")], 2)
    0.75
    """

    domains: Mapping[str, Sequence[str]]
    noise_std: float
    records_per_unit: int = 1
    label: str | None = None

    def __post_init__(self) -> None:
        if not self.domains or any(not d or len(set(d)) < len(d) for d in self.domains.values()):
            raise ValueError("domains must be one or more columns of different values")
        if self.records_per_unit < 1:
            raise ValueError(f"a unit has at least one record, got {self.records_per_unit!r}")
        checked_scale(self.noise_std, "noise_std")

    @property
    def pairs(self) -> list[tuple[str, ...]]:
        """Return the columns of each histogram."""
        return [*combinations(self.domains, 2)] or [tuple(self.domains)]

    @property
    def dp_event(self) -> SelfComposed:
        """Return the cost of one call: that of all histograms."""
        return SelfComposed(
            DiscreteGaussian(self.noise_std, self.records_per_unit), len(self.pairs)
        )

    def count(self, records: Iterable[Mapping[str, str]]) -> Counts:
        """Return the private counts of all histograms, one after the other, shape (N,).

        Counts of shards add up. A record without a value of a histogram's domains counts nowhere in
        it: a rule on that record.
        """
        cells = [
            {
                values: place
                for place, values in enumerate(product(*(self.domains[name] for name in pair)))
            }
            for pair in self.pairs
        ]
        starts = np.cumsum([0, *map(len, cells)])
        counts_N = np.zeros(starts[-1], dtype=np.int64)
        for record in records:
            for pair, cell, start in zip(self.pairs, cells, starts[:-1], strict=True):
                values = tuple(record[name] for name in pair)
                if (place := cell.get(values)) is not None:
                    counts_N[start + place] += 1
        return counts_N

    def count_rows(self, rows: Iterable[ReadOnlyJson]) -> Counts:
        """Return the private counts of records that have their values in `columns`."""
        # A column of Arrow's maps comes back as pairs.
        return self.count(dict(row["columns"]) for row in rows)

    def __call__(self, counts_N: npt.NDArray[np.integer]) -> Counts:
        """Return the released counts, shape (N,); may be negative."""
        return discrete_gaussian(counts_N, self.noise_std)

    def shares(self, noisy_N: npt.ArrayLike) -> dict[Values, float]:
        """Return the share of each combination of values: of the tables of shares that come nearest
        to the noisy histograms, in squares, one of much entropy."""
        return self._named(self._fitted(np.asarray(noisy_N, dtype=np.float64)).ravel().tolist())

    def _named(self, shares: Sequence[float]) -> dict[Values, float]:
        named = [[(column, value) for value in of] for column, of in self.domains.items()]
        return dict(zip(product(*named), shares, strict=True))

    def released(self, noisy_N: Counts) -> dict[str, object]:
        """Return what is published: the noisy counts, and the shares that follow from them, so that
        no later attempt draws from a table that another machine fits."""
        shares = [*self.shares(noisy_N).values()]
        return {"noisy_counts": noisy_N.tolist(), "shares": shares}

    def measured(self, released: ReadOnlyJson) -> tuple[dict[str, float], dict[Values, float]]:
        """Return the proportions of the labels, and the shares of combinations."""
        joint = self._named(released["shares"])
        return {"": 1.0} if self.label is None else margins(joint)[self.label], joint

    def _fitted(self, noisy_N: Table) -> Table:
        """Fit a table by mirror descent from equal shares (McKenna, Sheldon and Miklau 2019,
        Algorithm 1), with a step that grows while the loss falls."""
        sizes = [len(values) for values in self.domains.values()]
        axes = [tuple(map([*self.domains].index, pair)) for pair in self.pairs]
        shapes = [[sizes[axis] for axis in kept] for kept in axes]
        parts = np.split(noisy_N, np.cumsum([prod(shape) for shape in shapes])[:-1])
        # A histogram's total has the noise of each of its counts.
        records = np.average([part.sum() for part in parts], weights=[1 / p.size for p in parts])
        targets = [
            part.reshape(shape) / max(records, 1.0)
            for part, shape in zip(parts, shapes, strict=True)
        ]
        others = [tuple(axis for axis in range(len(sizes)) if axis not in kept) for kept in axes]

        def residuals(logits: Table) -> tuple[Table, list[Table], float]:
            table = np.exp(logits - logits.max())
            table /= table.sum()
            found = [table.sum(axis=o) - t for o, t in zip(others, targets, strict=True)]
            return table, found, sum(float(np.square(each).sum()) for each in found)

        logits, step = np.zeros(sizes), 64.0
        table, found, loss = residuals(logits)
        noise = self.noise_std / max(records, 1.0)
        for _ in range(STEPS):
            if loss <= NOISE_LEFT * noisy_N.size * noise**2:
                break
            gradient = sum(np.expand_dims(f, o) for f, o in zip(found, others, strict=True))
            tried = logits - step * gradient
            better, left, less = residuals(tried)
            if less < loss:
                logits, table, found, loss, step = tried, better, left, less, 1.5 * step
            else:
                step /= 2
        return table


def margins(shares: Mapping[Values, float]) -> dict[str, dict[str, float]]:
    """Return the share of each value of every column, from those of combinations."""
    found: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for values, share in shares.items():
        for column, value in values:
            found[column][value] += share
    return {column: dict(of_values) for column, of_values in found.items()}


def draw_values(
    groups: Iterable[Mapping[Values, float]], number: int, rng: np.random.Generator
) -> Sequence[dict[str, str]]:
    """Give each of `number` texts the values of one combination of every group, the groups
    independent of each other. `rng` is public.

    A group is sampled systematically: at equal steps along its cumulated shares, so that any
    consecutive combinations, such as all of a label, get their share but for one text.
    """
    drawn: list[dict[str, str]] = [{} for _ in range(number)]
    for shares in groups:
        ends = np.cumsum([*shares.values()])
        steps = (np.arange(number) + rng.random()) / number * ends[-1]
        combinations, places = [*shares], np.searchsorted(ends[:-1], steps, side="right")
        for text, place in zip(drawn, rng.permutation(places), strict=True):
            text.update(combinations[place])
    return drawn


def noise_for(epsilon: float, delta: float, histograms: int, records_per_unit: int) -> float:
    """Return the standard deviation at which so many histograms cost at most (epsilon, delta)
    together: rho + 2 sqrt(rho log(1 / delta)) = epsilon with rho = histograms (k / sigma)^2 / 2
    (Bun and Steinke 2016, Proposition 1.3). Their exact cost is about a quarter
    less."""
    budget = log(1 / delta)
    rho = (sqrt(budget + epsilon) - sqrt(budget)) ** 2
    return records_per_unit * sqrt(histograms / (2 * rho))
