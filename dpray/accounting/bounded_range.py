"""Draws of bounded range are composed exactly, as hockey-stick curves (Dong, Durfee and Rogers
2020).

A draw has bounded range `eta` if, for each pair of neighbours, its log-likelihood ratio lies in
[t - eta, t] for some t. `Curve` bounds delta as a function of epsilon; `composed_draws` is the
curve of the worst adaptive composition of such draws. Every approximation is on the safe side: the
computed curve is never below the exact one.
Proof: docs/privacy.md, section 6.7.
"""

from __future__ import annotations

import functools
import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dpray.accounting.event import FFT_ROUNDING, MOMENT_ROUNDING, dp_accounting, pld_library

if TYPE_CHECKING:
    from dp_accounting.pld.pld_pmf import PLDPmf
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution as Pld

Numbers = npt.NDArray[Any]

DRAWS_AT_ONCE = 256
"""The curves of at most this many draws are computed in one pass, and kept. More draws are parts
of so many, each a mechanism of its own: one pass takes time as their number to the power of 1.5."""

POINTS, CHORDS = 2**15, 8
"""Losses on either side of 0 at which the parts are composed, and how many of them lie under one
chord of their curve."""

TAIL, FAR_TAIL = 1e-15, 1e-100
"""A grid of epsilons ends where the delta of all draws together is below this. Rényi divergences
of many draws need what is farther out."""

ROUNDING = 1.0 + 2.0**-49
"""The rounding error of a step of the recursion is below this factor: it adds products of positive
numbers."""

TOP_ROUNDING, UNDERFLOW = 1e-12, 1e-290
"""Rounding moves the square of the place of a maximum by less than the first, relatively, if the
square is above the second."""


@dataclass(frozen=True)
class Curve:
    """Bounds a hockey-stick divergence delta(epsilon) from above.

    The bound is `deltas[i]` at `epsilons[i]` (increasing) and linear in exp(epsilon) between, which
    is above a convex curve. Below the grid it is the chord to delta = 1 at epsilon = -inf, above it
    the last delta. No loss exceeds `largest`, where the exact curve is 0.
    """

    epsilons: Numbers
    deltas: Numbers
    largest: float

    def __call__(self, epsilons: Numbers) -> Numbers:
        """Return the bound at each epsilon."""
        within = np.interp(np.exp(epsilons), np.exp(self.epsilons), self.deltas)
        below = 1.0 - (1.0 - self.deltas[0]) * np.exp(epsilons - self.epsilons[0])
        return np.where(epsilons < self.epsilons[0], below, within)

    def poisson_subsampled(self, q: float) -> tuple[Curve, Curve]:
        """Return the curves of removing and of adding a unit, if the unit takes part only with
        probability `q` (0 < q <= 1), by a secret coin.

        With P the law of the output if the unit takes part and Q if it does not, removing compares
        (1-q) Q + q P with Q, and adding compares Q with (1-q) Q + q P (Balle, Barthe and Gaboardi
        2018, Theorem 2). In exp(epsilon), both are projective maps of this curve: chords stay
        chords, and nodes stay nodes.
        """
        if q == 1.0:
            # The maps are the identity, but floats would round to -inf and inf.
            return self, self
        away = q + (1.0 - q) * np.exp(self.epsilons)
        removing = Curve(
            np.log1p(q * np.expm1(self.epsilons)),
            q * self.deltas,
            subsampled_loss(self.largest, q),
        )
        adding = Curve(
            -np.log1p(q * np.expm1(-self.epsilons)),
            q / away * self.deltas,
            -math.log1p(q * math.expm1(-self.largest)),
        )
        return removing, adding

    def pmf(self, interval: float) -> PLDPmf:
        """Return a privacy loss distribution whose curve is nowhere below this one. Its losses are
        the multiples of `interval` that are next to the nodes."""
        losses = np.unique(np.rint(self.epsilons / interval).astype(np.int64))
        # The outer nodes may have been rounded inwards.
        losses = np.concatenate([[losses[0] - 1], losses, [losses[-1] + 1]])
        return connected(interval, losses, self(losses * interval))

    def rdp(self, orders: tuple[float, ...]) -> Numbers:
        """Return the Rényi divergence at each order of the pair that has this curve. A pair that is
        worse at every epsilon is worse at every order, too (Zhu, Dong and Wang 2022)."""
        losses = np.append(self.epsilons, max(self.largest, self.epsilons[-1] + 1e-9))
        # Subsampling moves nodes together. Of nodes with the same exp(epsilon), between which a
        # slope would be NaN, the first has the largest delta and is kept.
        x, first = np.unique(np.exp(losses), return_index=True)
        x, losses = np.append(0.0, x), losses[first]
        deltas = np.concatenate([[1.0], np.append(self.deltas, 0.0)[first]])
        slopes = np.append(np.diff(deltas) / np.diff(x), 0.0)
        # delta is a sum of Q_i (x_i - x)_+ over the losses log(x_i), whose law under Q is Q_i.
        with np.errstate(divide="ignore"):
            log_Q = np.log(np.maximum(np.diff(slopes), 0.0))
        terms = log_Q + np.outer(orders, losses)
        top = terms.max(axis=1, keepdims=True)
        log_moment = top[:, 0] + np.log(np.exp(terms - top).sum(axis=1))
        found: Numbers = (np.maximum(log_moment, 0.0) + MOMENT_ROUNDING) / (
            np.asarray(orders) - 1.0
        )
        return found


def connected(interval: float, losses: Numbers, deltas: Numbers) -> PLDPmf:
    """Return the privacy loss distribution on `losses`, multiples of `interval`, of the curve whose
    chords connect `deltas`."""
    # Rounding may leave [0, 1], or make a flat curve rise.
    falling = np.minimum.accumulate(np.clip(deltas, 0.0, 1.0))
    # Dense, because dp-accounting composes sparse losses one by one, which is slow.
    create = dp_accounting.pld.pld_pmf.create_pmf_pessimistic_connect_dots
    pmf: PLDPmf = create(interval, losses, falling).to_dense_pmf()
    return pmf


def hockey_stick(loss: Pld, epsilons: Numbers) -> Numbers:
    """Return delta at each of `epsilons`, the larger of both directions. The sums, and their order,
    are those of dp-accounting's `get_delta_for_epsilon`, whose Python loop takes a hundred times as
    long."""
    pmfs = [loss._pmf_remove] if loss._symmetric else [loss._pmf_remove, loss._pmf_add]
    found: Numbers = np.max([_deltas(pmf.to_dense_pmf(), epsilons) for pmf in pmfs], axis=0)
    return found


def _deltas(pmf: PLDPmf, epsilons: Numbers) -> Numbers:
    losses = (np.arange(pmf.size) + pmf._lower_loss) * pmf._discretization
    probs, lower = pmf._probs[::-1], (pmf._probs * np.exp(-losses))[::-1]
    upper_mass = np.cumsum(np.append(pmf._infinity_mass, probs))
    lower_mass = np.cumsum(np.append(0.0, lower))
    above = len(losses) - np.searchsorted(losses, epsilons, side="right")
    found: Numbers = upper_mass[above] - np.exp(epsilons) * lower_mass[above]
    return found


def subsampled_loss(loss: float, q: float) -> float:
    """Return log(1 + q (exp(loss) - 1)), the loss of removing a unit that takes part with
    probability `q`, for any loss >= 0."""
    if loss < 30:
        return math.log1p(q * math.expm1(loss))
    return loss + math.log(q) + math.log1p((1.0 - q) / q * math.exp(-loss))


def composed_draws(eta: float, draws: int) -> Curve:
    """Return the curve of the worst adaptive composition of `draws` draws of range `eta`. It holds
    in both directions, because swapping the two worlds does not change the range."""
    if draws > DRAWS_AT_ONCE:
        return _composed_parts(eta, draws)
    return _grid(eta, max(16, 2 ** math.ceil(math.log2(draws)))).curve(draws)


def draws_pld(eta: float, draws: int, interval: float) -> Pld:
    """Return the privacy loss distribution of `draws` draws of range `eta`."""

    def composed(draws: int) -> Pld:
        return pld_library.PrivacyLossDistribution(composed_draws(eta, draws).pmf(interval))

    parts, rest = divmod(draws, DRAWS_AT_ONCE)
    if parts == 0:
        return composed(rest)
    total = composed(DRAWS_AT_ONCE).self_compose(parts)
    return total.compose(composed(rest)) if rest else total


@functools.lru_cache(maxsize=64)
def _composed_parts(eta: float, draws: int) -> Curve:
    """Return the curve of more than `DRAWS_AT_ONCE` draws, part by part. Far out, where the
    rounding of the FFT hides it, zCDP bounds delta by exp(-(epsilon - rho)^2 / (4 rho))."""
    interval = last_epsilon(eta, draws, FAR_TAIL) / POINTS
    right = interval * np.arange(0, POINTS + 1, CHORDS)
    deltas = hockey_stick(draws_pld(eta, draws, interval), right)
    rho = draws * eta**2 / 8
    tail = np.exp(-(np.maximum(right - rho, 0.0) ** 2) / (4 * rho))
    deltas = np.minimum(deltas + FFT_ROUNDING * (draws // DRAWS_AT_ONCE + 1), tail)
    # A swap of the worlds keeps ranges. It gives the left half, without a difference of numbers
    # near 1.
    half = right[right < last_epsilon(eta, draws, TAIL)][:0:-1]
    left = np.exp(-half) * deltas[len(half) : 0 : -1] - np.expm1(-half)
    return Curve(np.concatenate([-half, right]), np.concatenate([left, deltas]), draws * eta)


def last_epsilon(eta: float, draws: int, tail: float) -> float:
    """Return an epsilon at which the delta of `draws` draws is below `tail`, by zCDP."""
    rho = draws * eta**2 / 8
    return min(draws * eta, rho + 2 * math.sqrt(-rho * math.log(tail)))


@functools.lru_cache(maxsize=64)
def _grid(eta: float, draws: int) -> _Grid:
    """Return the grid of up to `draws` draws, which keeps the curves that were computed."""
    return _Grid(eta, draws)


class _Grid:
    """Computes the recursion over draws, on a grid of epsilons whose step divides eta:

        V_0(e) = max(0, 1 - exp(e))
        V_k(e) = max over t in [0, eta] of p_t V_{k-1}(e - t) + (1 - p_t) V_{k-1}(e - t + eta)

    with p_t = (1 - exp(t - eta)) / (1 - exp(-eta)). V_{k-1} is convex in exp(e), so losses at the
    two ends of [t - eta, t] are the worst.
    """

    def __init__(self, eta: float, draws: int) -> None:
        self.eta = eta
        # The curve of few draws has sharp bends, and needs a finer grid.
        self.steps = 64 if draws <= 16 else 32 if draws <= 64 else 16
        half = math.ceil(last_epsilon(eta, draws, TAIL) / eta * self.steps)
        self.epsilons = eta / self.steps * np.arange(-half, half + 1)
        t = eta / self.steps * np.arange(self.steps + 1)[:, None]
        self.u, self.q = np.exp(-t), math.exp(-eta)
        self.below = np.exp(-t[:0:-1, 0])
        # A square that underflows decides nothing.
        squares = self.u**2
        self.above_top = np.maximum(squares[:-1], UNDERFLOW) * (1.0 + TOP_ROUNDING)
        self.below_top = np.where(squares[1:] < UNDERFLOW, 0.0, squares[1:] * (1.0 - TOP_ROUNDING))
        # V_0, V_1, ..., as far as they were asked for. Threads share a grid: a row that two of them
        # appended would be that of fewer draws in the place of more.
        self.deltas: list[Numbers] = [np.maximum(0.0, -np.expm1(self.epsilons))]
        self.growing = threading.Lock()

    def curve(self, draws: int) -> Curve:
        """Return the curve of `draws` draws, up to their largest loss."""
        with self.growing:
            while len(self.deltas) <= draws:
                self.deltas.append(self._one_more(self.deltas[-1]))
        middle, reach = len(self.epsilons) // 2, draws * self.steps
        within = slice(max(0, middle - reach), middle + reach + 1)
        return Curve(self.epsilons[within], self.deltas[draws][within], draws * self.eta)

    def _one_more(self, V: Numbers) -> Numbers:
        """Return V_k on the grid, from V_{k-1}: the maximum over all t, also those between steps.

        Let t lie between two steps, and u = exp(-t). Both curves are chords there, linear in u:
        a + b u at e - t, and a' + b' u at e - t + eta. The value is A + B u + C / u: largest at an
        end or, if B and C are negative, at sqrt(C / B).
        """
        wide = np.concatenate([1.0 - (1.0 - V[0]) * self.below, V, np.full(self.steps, V[-1])])
        shifted = np.lib.stride_tricks.sliding_window_view(wide, len(V))
        # Row j: V at e - t_j, and at e - t_j + eta.
        near, far = shifted[self.steps :: -1], shifted[: self.steps - 1 : -1]
        u = self.u
        # With a range near 1e-16, steps coincide, and nothing lies between them.
        width = np.where(u[:-1] > u[1:], u[:-1] - u[1:], 1.0)
        b, b_far = (near[:-1] - near[1:]) / width, (far[:-1] - far[1:]) / width
        B = b - self.q * b_far
        C = self.q * (far[:-1] - near[:-1] - (b_far - b) * u[:-1])
        best = self._value(u, near, far).max(axis=0)
        # Few maxima lie between two steps. Only these are computed: elsewhere an end is larger.
        # Products decide which they may be: a quotient and a root everywhere take much longer. They
        # are in order only if B and C are negative.
        rows, columns = np.nonzero((self.above_top * B < C) & (self.below_top * B > C))
        top = np.sqrt(C[rows, columns] / B[rows, columns])
        inside = (u[rows + 1, 0] < top) & (top < u[rows, 0])
        rows, columns, top = rows[inside], columns[inside], top[inside]
        share = (top - u[rows + 1, 0]) / width[rows, 0]
        between = self._value(
            top,
            share * near[rows, columns] + (1 - share) * near[rows + 1, columns],
            share * far[rows, columns] + (1 - share) * far[rows + 1, columns],
        )
        np.maximum.at(best, columns, between)
        rounded: Numbers = np.minimum(best * ROUNDING, 1.0)
        return rounded

    def _value(self, u: Numbers, near: Numbers, far: Numbers) -> Numbers:
        """Return p_t `near` + (1 - p_t) `far` at t = -log u."""
        t = -np.log(u)
        p = np.expm1(t - self.eta) / math.expm1(-self.eta)
        value: Numbers = p * near + np.expm1(t) / math.expm1(self.eta) * far
        return value
