"""`cost` computes the epsilon of an event, the smallest of its bounds. `calibrate` is its inverse:
it finds the value of one free parameter that uses up a target (epsilon, delta).

- `pld`: the privacy loss distributions of `dp-accounting`, composed by FFT; draws of bounded range
  are composed exactly (Dong, Durfee and Rogers 2020), and a plan of only Gaussian mechanisms uses
  the closed form of its distribution (Balle and Wang 2018);
- `rdp`: Rényi DP on a grid of orders;
- `zcdp`: zero-concentrated DP with the optimised conversion of Canonne, Kamath and Steinke (2020),
  Corollary 13, which is Theorem 1 of Amin et al. (2024);
- `basic`: the sum of the pure epsilons.

All hold under adaptive choice of the mechanisms WITHIN a plan whose parameters were frozen
before the data was touched. Across plans, use `dpray.accounting.composition`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import scipy
from absl import logging as absl_logging

from dpray.accounting.composed_events import Parallel, SelfComposed
from dpray.accounting.event import (
    FFT_ROUNDING,
    Array,
    Event,
    canonical_json,
    check_delta,
    dp_accounting,
)
from dpray.accounting.events import Gaussian

# `scipy` imports its parts when they are used, as `dp_accounting` is: an actor needs neither.
if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution as Pld

# dp-accounting warns of each Rényi order that it leaves out. The bound holds without these orders.
absl_logging.set_verbosity(absl_logging.ERROR)

RDP_ORDERS: tuple[float, ...] = (
    *(1 + tenths / 10 for tenths in range(1, 100)),
    *(float(order) for order in (*range(11, 64), 128, 256, 512, 1024)),
)
"""The default orders of dp-accounting."""

QUICK_ORDERS = (2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 63.0, 128.0)
"""Some of these orders, whole ones, at which the divergence of a subsampled Gaussian takes a
twentieth of the time."""

# The closed form rounds delta by about 1e-14, so a much smaller delta is not reliable.
PLD_MIN_DELTA = 1e-10
# A plan with a larger epsilon by RDP protects nothing, and its PLD would take gigabytes.
PLD_MAX_EPSILON = 200.0
# Grid points for the losses of a plan: at 2^15 the epsilons of DP-SGD are within 1e-4 of the limit.
PLD_POINTS = 2**15
PLD_MIN_INTERVAL = 2.0**-20
# The root finder of the closed form stops this close to the answer, on either side.
GAUSSIAN_TOLERANCE = 1e-11
# A calibrated real parameter is this close to the best one, relatively.
CALIBRATION_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Cost:
    """A guarantee of (epsilon, delta)-DP, and the name of the bound that proves it."""

    epsilon: float
    delta: float
    bound: str


@functools.lru_cache(maxsize=256)
def cost(event: Event, delta: float) -> Cost:
    """Return the smallest epsilon that any bound gives at `delta` (0 <= delta < 1), and the name of
    that bound. Raises ValueError for another delta.

    Epsilon is `inf` if no bound is finite (only pure mechanisms have a finite epsilon at delta 0).
    Equal multisets of mechanisms cost the same to the last bit, however they are nested.
    """
    table = bounds(event, delta)
    bound = min(table, key=table.__getitem__)
    return Cost(table[bound], delta, bound)


MARGIN = 1.01
"""The grids of a whole and of a part differ: their costs are compared with this factor to spare."""


def is_affordable(event: Event, delta: float, epsilon: float) -> bool:
    """Return whether `cost(event, delta)` is at most `epsilon`, without the cost if less decides:
    one part that costs more, or a bound that costs no composition."""
    part = event.heaviest_part()
    if part != event and cost(part, delta).epsilon > MARGIN * epsilon:
        return False
    return _quick_epsilon(event, delta) <= epsilon or cost(event, delta).epsilon <= epsilon


def _quick_epsilon(event: Event, delta: float) -> float:
    """Return the smallest of the bounds that take little time, which is never below the cost."""
    quick = (
        zcdp_epsilon(event.zcdp_rho(), delta),
        event.pure_epsilon(),
        _rdp_epsilon(event, delta, QUICK_ORDERS),
    )
    return min(math.inf if math.isnan(epsilon) else epsilon for epsilon in quick)


def bounds(event: Event, delta: float) -> dict[str, float]:
    """Return the epsilon of every bound at `delta`, by name; `inf` if a bound does not apply."""
    check_delta(delta)
    table = {
        "pld": _pld_epsilon(event, delta),
        "rdp": _rdp_epsilon(event, delta),
        "zcdp": zcdp_epsilon(event.zcdp_rho(), delta),
        "basic": event.pure_epsilon(),
    }
    # A NaN bounds nothing, but would fit every budget.
    return {name: math.inf if math.isnan(epsilon) else epsilon for name, epsilon in table.items()}


def rdp_to_epsilon(rdp: float, order: float, delta: float) -> float:
    """Return epsilon at `delta` of a mechanism with this Rényi divergence at `order` (Canonne et
    al. 2020, Proposition 12)."""
    return _epsilon_of_rdp([order], [rdp], delta) if rdp < math.inf else math.inf


def zcdp_epsilon(rho: float, delta: float) -> float:
    """Return epsilon at `delta` of rho-zCDP: Theorem 1 of Amin et al. (2024), with its infimum."""
    if delta == 0 or rho == math.inf:
        return math.inf
    if rho == 0:
        return 0.0

    def epsilon(log_excess: float) -> float:
        """Return the bound at alpha = 1 + exp(log_excess)."""
        excess = math.exp(log_excess)
        log_order = math.log1p(excess)
        return rho * (1 + excess) + log_excess - log_order - (math.log(delta) + log_order) / excess

    # Every alpha is valid: a search that stops short costs tightness, never privacy.
    grid = np.linspace(-12.0, 24.0, 73)
    values = [epsilon(float(x)) for x in grid]
    best = int(np.argmin(values))
    near = (grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)])
    found = scipy.optimize.minimize_scalar(
        epsilon, bounds=near, method="bounded", options={"xatol": 1e-9}
    )
    return max(0.0, min(float(found.fun), values[best]))


def _rdp_epsilon(event: Event, delta: float, orders: tuple[float, ...] = RDP_ORDERS) -> float:
    if delta == 0:
        return math.inf  # dp-accounting answers 0 if the divergences are too small for a float
    # dp-accounting takes a divergence that is NaN for 0; here it bounds nothing.
    rdp = np.nan_to_num(event.rdp(orders), nan=math.inf, posinf=math.inf)
    return _epsilon_of_rdp(orders, rdp, delta)


def _epsilon_of_rdp(orders: Sequence[float], rdp: Sequence[float] | Array, delta: float) -> float:
    return float(dp_accounting.rdp.compute_epsilon(orders, rdp, delta)[0])


def _pld_epsilon(event: Event, delta: float) -> float:
    if delta < PLD_MIN_DELTA:
        return math.inf
    mu = event.gaussian_mu()
    if mu is not None:
        with np.errstate(divide="ignore"):
            return float(dp_accounting.get_epsilon_gaussian(1 / mu, delta)) + GAUSSIAN_TOLERANCE
    exact = delta - FFT_ROUNDING * _convolutions(event)
    if exact <= 0:
        return math.inf
    pld = _composed_pld(event)
    return math.inf if pld is None else float(pld.get_epsilon_for_delta(exact))


def _convolutions(event: Event) -> int:
    """Return how many privacy loss distributions are composed for an event."""
    return sum(
        count * (max(map(_convolutions, part.events)) if isinstance(part, Parallel) else 1)
        for part, count in event.terms().items()
    )


@functools.lru_cache(maxsize=8)
def _composed_pld(event: Event) -> Pld | None:
    """Return the plan's PLD, on a grid whose step is a power of two set by the plan only; None if
    the plan costs too much."""
    largest_loss = min(_rdp_epsilon(event, PLD_MIN_DELTA), event.pure_epsilon())
    if not 0 < largest_loss <= PLD_MAX_EPSILON:
        return None
    interval = max(2.0 ** math.ceil(math.log2(2 * largest_loss / PLD_POINTS)), PLD_MIN_INTERVAL)
    total: Pld | None = None
    # Sorted, because the rounding of a convolution depends on the order.
    for part, count in sorted(event.terms().items(), key=lambda t: canonical_json(t[0].to_json())):
        pld = part.pld(interval, count)
        total = pld if total is None else total.compose(pld)
    return total


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

    If `increasing`, the cost grows with the parameter (number of tokens, clip bound), and the
    answer is the largest valid value. Otherwise the cost falls (noise multiplier, temperature,
    batch size), and the answer is the smallest valid value. The cost must be monotone over
    `bracket` (0 < low < high). With `integer`, `make_event` gets an int and the answer is exact;
    otherwise it is valid and within a relative 1e-6 of the best.

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
    """Return the smallest noise multiplier (standard deviation over L2 sensitivity) at which
    `count` Gaussian mechanisms together cost at most the target."""
    return calibrate(
        lambda z: SelfComposed(Gaussian(z), count),
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
        return self._gap(self.epsilons[value])

    def _gap(self, epsilon: float) -> float:
        ratio = epsilon / self.epsilon
        return min(math.log(ratio), 50.0) if ratio > 0 else -50.0

    def part_gap(self, value: float) -> float:
        """Return `gap` of the part that is expected to cost most, which is never above it."""
        return self._gap(cost(self.make_event(value).heaviest_part(), self.delta).epsilon)

    def is_valid(self, value: float) -> bool:
        if value in self.epsilons:
            return self.gap(value) <= 0
        return is_affordable(self.make_event(value), self.delta, self.epsilon)

    def walk(self, tight: float, safe: float, integer: bool) -> tuple[float, float]:
        """Return the first valid one of the values from the expensive end by factors of two, and
        the invalid one before it. It is looked for near the first that a quick bound finds valid.
        """
        values = [tight]
        while values[-1] != safe:
            value = min(values[-1] * 2, safe) if safe > tight else max(values[-1] / 2, safe)
            values.append(math.floor(value) if integer else value)

        def is_quickly_valid(value: float) -> bool:
            part = self.make_event(value).heaviest_part()
            return _quick_epsilon(part, self.delta) <= self.epsilon

        last = len(values) - 1
        place = next((i for i in range(1, last) if is_quickly_valid(values[i])), last)
        while not self.is_valid(values[place]):
            if place == last:
                raise ValueError(
                    f"no value from {min(safe, tight):g} to {max(safe, tight):g} reaches epsilon "
                    f"{self.epsilon:g} at delta {self.delta:g}: {safe:g} still costs "
                    f"{cost(self.make_event(safe), self.delta).epsilon:g}"
                )
            place += 1
        while place > 1 and self.is_valid(values[place - 1]):
            place -= 1
        return values[place], values[place - 1]

    def integers(self, valid: float, invalid: float) -> float:
        """Find the last valid number by the part that costs most, and then by the whole."""
        event = self.make_event(valid)
        if event.heaviest_part() != event and self.part_gap(invalid) > 0:
            last, next_one = self._neighbours(valid, invalid, self.part_gap)
            if self.gap(last) > 0:
                invalid = last
            elif self.gap(next_one) > 0:
                return last
            else:
                valid = next_one
        return self._neighbours(valid, invalid, self.gap)[0]

    def _neighbours(
        self, valid: float, invalid: float, gap: Callable[[float], float]
    ) -> tuple[int, int]:
        """Return two neighbours, of which the first is valid: by false position of the logarithms,
        in which an end that stays loses half of its weight (the Illinois rule)."""
        ends = [int(valid), int(invalid)]
        gaps = [gap(ends[0]), gap(ends[1])]
        moved = None
        while abs(ends[1] - ends[0]) > 1:
            share = gaps[0] / (gaps[0] - gaps[1])
            found = round(math.exp((1 - share) * math.log(ends[0]) + share * math.log(ends[1])))
            middle = min(max(found, min(ends) + 1), max(ends) - 1)
            value = gap(middle)
            end = 0 if value <= 0 else 1
            ends[end], gaps[end] = middle, value
            if moved == end:
                gaps[1 - end] /= 2
            moved = end
        return ends[0], ends[1]

    def reals(self, valid: float, invalid: float) -> float:
        """Interpolate, then bisect the interval that is left: a kink in the cost may have misled
        the interpolation."""
        scipy.optimize.toms748(
            self.gap, *sorted((valid, invalid)), xtol=1e-300, rtol=CALIBRATION_TOLERANCE / 2
        )
        towards_invalid = sorted(self.epsilons, reverse=invalid < valid)
        first = next(i for i, value in enumerate(towards_invalid) if self.gap(value) > 0)
        valid, invalid = towards_invalid[first - 1], towards_invalid[first]
        while abs(math.log(invalid / valid)) > CALIBRATION_TOLERANCE:
            middle = math.sqrt(valid) * math.sqrt(invalid)
            valid, invalid = (middle, invalid) if self.gap(middle) <= 0 else (valid, middle)
        return float(valid)
