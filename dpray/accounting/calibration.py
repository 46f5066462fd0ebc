"""`calibrate` finds the value of a plan's one free parameter that uses up a target (epsilon,
delta)."""

from __future__ import annotations

import math
from collections.abc import Callable

from dpray.accounting.accountant import cost
from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.event import Event, check_delta
from dpray.accounting.events import Gaussian

TOLERANCE = 1e-6


def calibrate(
    make_event: Callable[[float], Event],
    target_epsilon: float,
    target_delta: float,
    *,
    bracket: tuple[float, float],
    increasing: bool,
    integer: bool = False,
) -> float:
    """Return the parameter that uses up the target and no more: cost(make_event(x)) <=
    target_epsilon.

    `increasing` says whether the cost grows with the parameter (r, clip bound: the largest valid
    value is returned) or falls (noise, temperature, batch size: the smallest). It must be monotone
    over `bracket` (0 < low < high); if all of the bracket is valid, the end in that direction is
    the answer. With `integer`, `make_event` gets an int and the answer is the exact integer; else
    it is within a relative 1e-6 of the best, on the valid side.

    Raises ValueError for a bad target or bracket, and if no value in the bracket is valid.
    """
    if not (math.isfinite(target_epsilon) and target_epsilon > 0):
        raise ValueError(f"target_epsilon must be a positive finite number, got {target_epsilon}")
    check_delta(target_delta)
    if not 0 < bracket[0] < bracket[1] < math.inf:
        raise ValueError(f"bracket must be two increasing positive numbers, got {bracket}")
    search = _Search(make_event, target_epsilon, target_delta)
    low, high = (math.ceil(bracket[0]), math.floor(bracket[1])) if integer else bracket
    safe, tight = (low, high) if increasing else (high, low)
    if search.gap(tight) <= 0:
        return tight
    valid, invalid = search.walk(tight, safe, integer)
    return search.integers(valid, invalid) if integer else search.reals(valid, invalid)


def noise_multiplier(target_epsilon: float, target_delta: float, *, count: int) -> float:
    """Return the smallest noise multiplier of `count` Gaussian mechanisms."""
    return calibrate(
        lambda noise: SelfComposed(Gaussian(noise), count),
        target_epsilon,
        target_delta,
        bracket=(1e-3, 1e7),
        increasing=False,
    )


class _Search:
    """Searches between a valid and an invalid value, over the costs seen so far."""

    def __init__(self, make_event: Callable[[float], Event], epsilon: float, delta: float) -> None:
        self.make_event, self.epsilon, self.delta = make_event, epsilon, delta
        self.epsilons: dict[float, float] = {}

    def gap(self, value: float) -> float:
        """Return log(cost / target), clipped: positive if the value costs too much."""
        if value not in self.epsilons:
            self.epsilons[value] = cost(self.make_event(value), self.delta).epsilon
        ratio = self.epsilons[value] / self.epsilon
        return min(math.log(ratio), 50.0) if ratio > 0 else -50.0

    def walk(self, tight: float, safe: float, integer: bool) -> tuple[float, float]:
        """Return the first valid value, and the invalid one before it, in factors of two from the
        expensive end, where costs are fast because only the cheap bounds matter."""
        value = tight
        while value != safe:
            invalid, value = value, value * 2 if safe > tight else value / 2
            value = min(value, safe) if safe > tight else max(value, safe)
            value = math.floor(value) if integer else value
            if self.gap(value) <= 0:
                return value, invalid
        raise ValueError(
            f"no value from {min(safe, tight):g} to {max(safe, tight):g} reaches epsilon "
            f"{self.epsilon:g} at delta {self.delta:g}: {safe:g} still costs "
            f"{self.epsilons[safe]:g}"
        )

    def integers(self, valid: float, invalid: float) -> float:
        while abs(invalid - valid) > 1:
            middle = (int(valid) + int(invalid)) // 2
            valid, invalid = (middle, invalid) if self.gap(middle) <= 0 else (valid, middle)
        return valid

    def reals(self, valid: float, invalid: float) -> float:
        """Interpolate, then bisect what the interpolation left open, so that a kink in the cost
        cannot spoil the answer."""
        from scipy.optimize import toms748  # late: most plans are only read

        toms748(self.gap, *sorted((valid, invalid)), xtol=1e-300, rtol=TOLERANCE / 2)
        towards_invalid = sorted(self.epsilons, reverse=invalid < valid)
        first = next(i for i, value in enumerate(towards_invalid) if self.gap(value) > 0)
        valid, invalid = towards_invalid[first - 1], towards_invalid[first]
        while abs(math.log(invalid / valid)) > TOLERANCE:
            middle = math.sqrt(valid) * math.sqrt(invalid)
            valid, invalid = (middle, invalid) if self.gap(middle) <= 0 else (valid, middle)
        return float(valid)
