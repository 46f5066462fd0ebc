"""`laplace_scale` gives Laplace noise whose cost never exceeds an epsilon, not even by rounding."""

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
