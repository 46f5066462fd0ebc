"""A noisy histogram measures label proportions that are not public; records are divided by the
proportions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from dpray.accounting.events import DiscreteLaplace
from dpray.mechanisms.attributes import Values
from dpray.mechanisms.discrete_noise import Counts, checked_scale, discrete_laplace, laplace_scale
from dpray.types import ReadOnlyJson

K = TypeVar("K", bound=Hashable)

RARE = 0.25
"""A label is rare if its share is below this fraction of an equal share."""


@dataclass(frozen=True)
class LabelHistogram:
    """Counts records per label, with discrete Laplace noise on every count.

    Guarantee: add or remove one unit, of at most k = `records_per_unit` records. A record adds one
    to one count: L1 sensitivity k. Every label of the public set gets noise of Laplace scale
    k/epsilon, absent ones too. One call is `epsilon`-DP.
    Proof: docs/privacy.md, section 1.5.

    Raises ValueError for an empty label set, a label named twice, or a bad epsilon or unit size.

    >>> histogram = LabelHistogram(("news", "sport"), epsilon=0.5)
    >>> exact = histogram.count(["news", "sport", "news"])  # private
    >>> noisy = histogram(exact)  # may be released
    >>> sum(histogram.proportions(noisy).values())
    1.0
    >>> histogram.dp_event.pure_epsilon()
    0.5
    """

    labels: tuple[str, ...]
    epsilon: float
    records_per_unit: int = 1

    def __post_init__(self) -> None:
        if not self.labels or len(set(self.labels)) < len(self.labels):
            raise ValueError("labels must be one or more different names")
        if not 0 < self.epsilon < math.inf:
            raise ValueError(f"epsilon must be a positive finite number, got {self.epsilon!r}")
        if self.records_per_unit < 1:
            raise ValueError(f"a unit has at least one record, got {self.records_per_unit!r}")
        checked_scale(self.scale)

    @property
    def scale(self) -> float:
        """Return the Laplace scale k/epsilon, rounded so that k/scale is never over epsilon."""
        return laplace_scale(self.records_per_unit, self.epsilon)

    @property
    def dp_event(self) -> DiscreteLaplace:
        """Return the cost of one call."""
        return DiscreteLaplace(scale=self.scale, sensitivity=self.records_per_unit)

    def count(self, labels: Iterable[str]) -> Counts:
        """Return the private number of records of each label, in the order of the set.

        Counts of shards add up. A record of another label counts nowhere: a rule on that record.
        """
        found = Counter(labels)
        return np.array([found[label] for label in self.labels], dtype=np.int64)

    def count_rows(self, rows: Iterable[ReadOnlyJson]) -> Counts:
        """Return the private counts of records that have a `label`."""
        return self.count(row["label"] for row in rows)

    def __call__(self, counts_N: npt.NDArray[np.integer]) -> Counts:
        """Return the released counts, in the order of `labels`; may be negative."""
        return discrete_laplace(counts_N, self.scale)

    def proportions(self, noisy_N: Counts) -> dict[str, float]:
        """Return the noisy counts cut at 0, as shares of 1; uniform if none is over 0."""
        weights_N = np.maximum(noisy_N, 0).astype(np.float64)
        if not weights_N.any():
            weights_N[:] = 1.0
        shares = (weights_N / weights_N.sum()).tolist()
        return dict(zip(self.labels, shares, strict=True))

    def released(self, noisy_N: Counts) -> dict[str, object]:
        """Return what is published: the noisy counts, and the proportions that follow from them."""
        counts = dict(zip(self.labels, noisy_N.tolist(), strict=True))
        return {"noisy_counts": counts, "proportions": self.proportions(noisy_N)}

    def measured(self, released: ReadOnlyJson) -> tuple[dict[str, float], dict[Values, float]]:
        """Return the proportions of the labels, and no shares of combinations."""
        return released["proportions"], {}


def largest_remainder(records: int, proportions: Mapping[K, float]) -> dict[K, int]:
    """Split `records` by public proportions that sum to 1. The shares are rounded down; the records
    left over go, one each, to the largest remainders, ties in the order of `proportions`.

    >>> largest_remainder(10, {"a": 0.55, "b": 0.27, "c": 0.18})
    {'a': 5, 'b': 3, 'c': 2}
    """
    shares = {label: records * proportion for label, proportion in proportions.items()}
    split = {label: math.floor(share) for label, share in shares.items()}
    left = records - sum(split.values())
    by_remainder = sorted(shares, key=lambda label: split[label] - shares[label])
    for label in by_remainder[:left]:
        split[label] += 1
    return split


def common_shares(proportions: Mapping[K, float]) -> dict[K, float]:
    """Return the shares of the labels that are not rare: those of at least `RARE` of an equal share
    among the labels that have one. The most common label is always among them."""
    shares = {label: share for label, share in proportions.items() if share > 0}
    return {label: share for label, share in shares.items() if share >= RARE / len(shares)}
