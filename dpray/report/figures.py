"""Numbers are written for people."""

from __future__ import annotations

import math
from collections.abc import Mapping


def at_most(value: float, digits: int = 3) -> str:
    """Write an upper bound, rounded up to so many significant digits."""
    step = 10.0 ** (math.floor(math.log10(value)) + 1 - digits)
    rounded = math.ceil(value / step * (1 - 1e-12)) * step
    whole = rounded >= 10 ** (digits - 1)
    return f"{rounded:,.0f}" if whole else f"{rounded:.{digits}g}"


def one_in(probability: float) -> str:
    """Write a small probability as "1 in 1,000,000", never understated; empty for zero."""
    return f"1 in {math.floor(1 / probability * (1 + 1e-12)):,}" if probability > 0 else ""


def number(value: float) -> str:
    """Write a number with commas between thousands or six significant digits; 1e-6, not 1e-06."""
    if isinstance(value, int):
        return f"{value:,}"
    mantissa, _, exponent = f"{value:.6g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def plus_minus(value: Mapping[str, float], digits: int) -> str:
    return f"{value['mean']:.{digits}f} ± {value['deviation']:.{digits}f}"
