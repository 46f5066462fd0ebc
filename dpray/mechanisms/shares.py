"""`largest_remainder` divides records among labels or topics."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def largest_remainder(records: int, proportions: Mapping[K, float]) -> dict[K, int]:
    """Split `records` by public proportions that sum to 1: rounded down, and what is left over one
    each to the largest remainders, ties in the order of `proportions`. The sum is exact."""
    shares = {label: records * proportion for label, proportion in proportions.items()}
    split = {label: math.floor(share) for label, share in shares.items()}
    left = records - sum(split.values())
    by_remainder = sorted(shares, key=lambda label: split[label] - shares[label])
    for label in by_remainder[:left]:
        split[label] += 1
    return split
