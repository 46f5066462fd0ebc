"""Records are divided among labels or topics by their public shares."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

RARE = 0.25
"""A label is rare if its share is below this part of an equal one."""


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


def common_shares(proportions: Mapping[K, float]) -> dict[K, float]:
    """Return the shares of the labels that are not rare: those of at least `RARE` of an equal share
    among the labels that have one. The most common label is always among them."""
    shares = {label: share for label, share in proportions.items() if share > 0}
    return {label: share for label, share in shares.items() if share >= RARE / len(shares)}
