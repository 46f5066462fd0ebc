"""The scale of Laplace noise for an epsilon that may not be passed, not even by a rounding."""

from __future__ import annotations

import math


def laplace_scale(sensitivity: float, epsilon: float, *, count: int = 1) -> float:
    """Return count * sensitivity / epsilon, the scale at which `count` mechanisms of this L1
    sensitivity cost `epsilon` together, rounded so that count * (sensitivity / scale) is never over
    it."""
    scale = count * sensitivity / epsilon
    while count * (sensitivity / scale) > epsilon:
        scale = math.nextafter(scale, math.inf)
    return scale
