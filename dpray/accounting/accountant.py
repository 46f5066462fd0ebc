"""What a frozen plan costs: the smallest valid epsilon over four bounds.

- `pld`: the privacy loss distributions of `dp-accounting`, composed by FFT; a plan of Gaussian
  mechanisms alone uses the closed form of their distribution (Balle and Wang 2018);
- `rdp`: Rényi DP on a grid of orders;
- `zcdp`: zero-concentrated DP with the optimised conversion of Canonne, Kamath and Steinke (2020),
  Corollary 13, which is Theorem 1 of Amin et al. (2024);
- `basic`: the sum of the pure epsilons.

All four hold under adaptive choice of the mechanisms WITHIN a plan whose parameters were frozen
before the data was touched. Across plans, use `dpray.accounting.composition`.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from absl import logging as absl_logging
from dp_accounting import get_epsilon_gaussian
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution as Pld
from dp_accounting.rdp import compute_epsilon
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS, compute_delta
from scipy.optimize import minimize_scalar
from scipy.special import log_ndtr

from dpray.accounting.events import Event, canonical_json

# dp-accounting warns of each Rényi order that it leaves out; the bound holds without them.
absl_logging.set_verbosity(absl_logging.ERROR)

RDP_ORDERS: tuple[float, ...] = tuple(float(order) for order in DEFAULT_RDP_ORDERS)

# Rounding moves a delta of the FFT, or of the closed form, by about 1e-14: below this it is noise.
PLD_MIN_DELTA = 1e-10
# A plan that costs more by RDP protects nothing: a PLD there would take gigabytes to say so.
PLD_MAX_EPSILON = 200.0
# Grid points for the losses of a plan: at 2^15 the epsilons of DP-SGD are within 1e-4 of the limit.
PLD_POINTS = 2**15
PLD_MIN_INTERVAL = 2.0**-20
# The root finder of the closed form stops this close to the answer, on either side.
GAUSSIAN_TOLERANCE = 1e-11

Terms = tuple[tuple[Event, int], ...]


@dataclass(frozen=True)
class Cost:
    """The mechanism is (epsilon, delta)-DP, shown by `bound`."""

    epsilon: float
    delta: float
    bound: str


def cost(event: Event, delta: float) -> Cost:
    """The smallest epsilon that any bound gives at `delta` (0 <= delta < 1), and that bound's name.

    `inf` where no bound is finite (only pure mechanisms have a finite epsilon at delta 0). Equal
    multisets of mechanisms cost the same to the last bit, however they are nested.
    """
    check_delta(delta)
    tables = [_epsilons(terms, delta) for terms in _alternatives(event)]
    best = [min(table.items(), key=lambda item: item[1]) for table in tables]
    bound, epsilon = max(best, key=lambda item: item[1])
    return Cost(epsilon, delta, bound)


def bounds(event: Event, delta: float) -> dict[str, float]:
    """The epsilon of every bound at `delta`, by name; `inf` where a bound does not apply."""
    check_delta(delta)
    tables = [_epsilons(terms, delta) for terms in _alternatives(event)]
    return {name: max(table[name] for table in tables) for name in tables[0]}


def delta_for(event: Event, epsilon: float) -> float:
    """The smallest delta that any bound gives at `epsilon` (>= 0)."""
    if not epsilon >= 0:
        raise ValueError(f"epsilon must be a number >= 0, got {epsilon}")
    return max(_smallest_delta(terms, epsilon) for terms in _alternatives(event))


def rdp_epsilon(event: Event, order: float) -> float:
    """The Rényi divergence at one order (> 1): what a Rényi filter adds up."""
    return float(event.rdp((order,))[0])


def rdp_to_epsilon(rdp: float, order: float, delta: float) -> float:
    """Epsilon at `delta` of a mechanism with this Rényi divergence at `order` (Canonne et al. 2020,
    Proposition 12)."""
    return float(compute_epsilon([order], [rdp], delta)[0]) if rdp < math.inf else math.inf


def zcdp_epsilon(rho: float, delta: float) -> float:
    """Epsilon at `delta` of rho-zCDP: Theorem 1 of Amin et al. (2024), with its infimum."""
    if rho == 0:
        return 0.0
    if delta == 0 or rho == math.inf:
        return math.inf

    def epsilon(log_excess: float) -> float:
        excess = math.exp(log_excess)
        log_order = math.log1p(excess)
        return rho * (1 + excess) + log_excess - log_order - (math.log(delta) + log_order) / excess

    return max(0.0, _minimum(epsilon))


def zcdp_delta(rho: float, epsilon: float) -> float:
    """Delta at `epsilon` of rho-zCDP: Theorem 1 of Amin et al. (2024)."""
    if rho == 0:
        return 0.0
    if rho == math.inf:
        return 1.0

    def log_delta(log_excess: float) -> float:
        excess = math.exp(log_excess)
        log_order = math.log1p(excess)
        exponent = excess * (rho * (1 + excess) - epsilon)
        return exponent - log_excess + (1 + excess) * (log_excess - log_order)

    return math.exp(min(0.0, _minimum(log_delta)))


def _minimum(function: Callable[[float], float]) -> float:
    """The minimum over alpha of a bound written in log(alpha - 1): every alpha is valid, so that a
    search that stops short costs tightness, never privacy."""
    grid = np.linspace(-12.0, 24.0, 73)
    values = [function(float(x)) for x in grid]
    best = int(np.argmin(values))
    near = (grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)])
    found = minimize_scalar(function, bounds=near, method="bounded", options={"xatol": 1e-9})
    return min(float(found.fun), values[best])


def _epsilons(terms: Terms, delta: float) -> dict[str, float]:
    return {
        "pld": _pld_epsilon(terms, delta),
        "rdp": float(compute_epsilon(RDP_ORDERS, _rdp(terms), delta)[0]),
        "zcdp": zcdp_epsilon(_rho(terms), delta),
        "basic": _pure(terms),
    }


def _smallest_delta(terms: Terms, epsilon: float) -> float:
    return min(
        _pld_delta(terms, epsilon),
        float(compute_delta(RDP_ORDERS, _rdp(terms), epsilon)[0]),
        zcdp_delta(_rho(terms), epsilon),
        0.0 if _pure(terms) <= epsilon else 1.0,
    )


def _pld_epsilon(terms: Terms, delta: float) -> float:
    if delta < PLD_MIN_DELTA:
        return math.inf
    mu = _gaussian_mu(terms)
    if mu is not None:
        with np.errstate(divide="ignore"):
            return float(get_epsilon_gaussian(1 / mu, delta)) + GAUSSIAN_TOLERANCE
    pld = _composed_pld(terms)
    return math.inf if pld is None else float(pld.get_epsilon_for_delta(delta))


def _pld_delta(terms: Terms, epsilon: float) -> float:
    mu = _gaussian_mu(terms)
    if mu is not None:
        upper = log_ndtr(mu / 2 - epsilon / mu)
        lower = epsilon + log_ndtr(-mu / 2 - epsilon / mu)
        delta = -math.exp(upper) * math.expm1(min(0.0, lower - upper))
    else:
        pld = _composed_pld(terms)
        delta = 1.0 if pld is None else float(pld.get_delta_for_epsilon(epsilon))
    return max(PLD_MIN_DELTA, delta)


def _gaussian_mu(terms: Terms) -> float | None:
    """The mu of the whole plan if every term is exactly Gaussian (Dong et al. 2022, Cor. 3.3)."""
    mus = [(event.gaussian_mu(), count) for event, count in terms]
    squares = [count * mu**2 for mu, count in mus if mu is not None]
    return math.sqrt(math.fsum(squares)) if len(squares) == len(mus) else None


@functools.lru_cache(maxsize=8)
def _composed_pld(terms: Terms) -> Pld | None:
    """The plan's PLD, on a grid whose step is a power of two set by the plan alone."""
    spread = min(
        float(compute_epsilon(RDP_ORDERS, _rdp(terms), PLD_MIN_DELTA)[0]),
        _pure(terms),
    )
    if not 0 < spread <= PLD_MAX_EPSILON:
        return None
    interval = max(2.0 ** math.ceil(math.log2(2 * spread / PLD_POINTS)), PLD_MIN_INTERVAL)
    parts = (event.pld(interval, count) for event, count in terms)
    total: Pld | None = None
    for part in parts:
        if part is None:
            return None
        total = part if total is None else total.compose(part)
    return total


@functools.lru_cache(maxsize=8)
def _rdp(terms: Terms) -> list[float]:
    rows = [count * event.rdp(RDP_ORDERS) for event, count in terms]
    return [math.fsum(column) for column in zip(*rows, strict=True)]


def _rho(terms: Terms) -> float:
    return math.fsum(count * event.zcdp_rho() for event, count in terms)


def _pure(terms: Terms) -> float:
    return math.fsum(count * event.pure_epsilon() for event, count in terms)


def _alternatives(event: Event) -> Iterator[Terms]:
    """The sequential compositions of which a given unit meets one: parallel parts taken apart."""
    pending = [event.terms()]
    while pending:
        terms = pending.pop()
        split = next((e for e, n in terms.items() if n == 1 and len(e.alternatives()) > 1), None)
        if split is None:
            yield tuple(sorted(terms.items(), key=lambda term: canonical_json(term[0])))
            continue
        rest: Counter[Event] = Counter(terms)
        del rest[split]
        pending.extend(rest + part.terms() for part in split.alternatives())


def check_delta(delta: float) -> None:
    """Raises ValueError unless 0 <= delta < 1."""
    if not 0 <= delta < 1:
        raise ValueError(f"delta must be at least 0 and below 1, got {delta}")
