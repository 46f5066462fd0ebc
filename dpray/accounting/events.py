"""The mechanisms that dpray runs, each as an `Event` with its bounds.

`noise_multiplier` is the standard deviation over the L2 sensitivity. `sigma` is a standard
deviation (of the Gaussian before it is made discrete) and `scale` a Laplace scale, both in the unit
of the values.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dpray.accounting.bounded_range import Curve, composed_draws, draws_pld, subsampled_loss
from dpray.accounting.event import (
    MOMENT_ROUNDING,
    Array,
    Event,
    Probability,
    dp_accounting,
    pld_library,
)

if TYPE_CHECKING:
    from dp_accounting import DpEvent
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution as Pld

PLD_MOST_SHIFTS = 2**14
"""With a larger sensitivity, the privacy loss distribution of discrete Laplace noise is computed on
a coarser grid."""

MOST_LOSS = 700.0
"""The exponential of a larger loss overflows a float64."""


@dataclass(frozen=True)
class Gaussian(Event):
    """Adds Gaussian noise of standard deviation `noise_multiplier` * L2 sensitivity."""

    noise_multiplier: float
    name: ClassVar[str] = "gaussian"

    def zcdp_rho(self) -> float:
        return 0.5 / self.noise_multiplier**2

    def gaussian_mu(self) -> float:
        return 1.0 / self.noise_multiplier

    def pld(self, interval: float, count: int) -> Pld:
        return pld_library.from_gaussian_mechanism(
            self.noise_multiplier / math.sqrt(count), value_discretization_interval=interval
        )


@dataclass(frozen=True)
class DiscreteLaplace(Event):
    """Adds integer noise with mass proportional to exp(-|x| / scale) to integer values that one
    unit changes by at most `sensitivity` in L1.

    The worst case, and the one whose privacy loss distribution is used, is a single coordinate that
    changes by all of `sensitivity`. If no coordinate changes by more than m, and all together by at
    most n m, the worst case is n coordinates that change by m:
    `SelfComposed(DiscreteLaplace(scale, m), n)`.
    Proof: docs/privacy.md, section 6.8.
    """

    scale: float
    sensitivity: int
    name: ClassVar[str] = "discrete_laplace"

    def pure_epsilon(self) -> float:
        return self.sensitivity / self.scale

    def rdp(self, orders: tuple[float, ...]) -> Array:
        """Return the closed form for a shift by S = `sensitivity`, with room for its rounding. With
        a = 1 / scale, the loss is a S at x <= 0, a (S - 2x) at x = 1, ..., S-1, and -a S at
        x >= S."""
        alpha, a, S = np.asarray(orders), 1.0 / self.scale, self.sensitivity
        log_r = -a * (2 * alpha - 1)
        ends = (1 + np.exp(S * log_r)) / (1 + math.exp(-a))
        inner = np.expm1((S - 1) * log_r) / np.expm1(log_r) * np.exp(log_r)
        moment = ends + math.tanh(a / 2) * inner
        found: Array = np.maximum(a * S + np.log(moment) / (alpha - 1), 0.0)
        return np.minimum(super().rdp(orders), found + MOMENT_ROUNDING / (alpha - 1))

    def pld(self, interval: float, count: int) -> Pld:
        coarse = self._coarse()
        one = pld_library.from_discrete_laplace_mechanism(
            1.0 / coarse.scale,
            sensitivity=coarse.sensitivity,
            value_discretization_interval=interval,
            use_connect_dots=True,
        )
        return one.self_compose(count)

    def _coarse(self) -> DiscreteLaplace:
        """Return an event that costs at least as much and whose distribution has fewer points.

        Its grid is `step` times as coarse. A shift by `step` is step/scale-DP. It is no worse than
        a shift by 1 under noise of scale scale/step, which is randomised response; the same holds
        for a chain of such shifts.
        """
        step = -(-self.sensitivity // PLD_MOST_SHIFTS)
        if step == 1:
            return self
        # The rounded quotient may be too large; the next smaller float is not.
        scale = math.nextafter(self.scale / step, 0.0)
        return DiscreteLaplace(scale, -(-self.sensitivity // step))


@dataclass(frozen=True)
class DiscreteGaussian(Event):
    """Adds integer noise with mass proportional to exp(-x^2 / (2 sigma^2)) to integer values that
    one unit changes by at most `sensitivity` in L1 (Canonne, Kamath, Steinke 2020).

    The worst case, and the one whose privacy loss distribution is used, is a single coordinate that
    changes by all of `sensitivity`.
    """

    sigma: float
    sensitivity: int
    name: ClassVar[str] = "discrete_gaussian"

    def zcdp_rho(self) -> float:
        return 0.5 * (self.sensitivity / self.sigma) ** 2

    def pld(self, interval: float, count: int) -> Pld:
        one = pld_library.from_discrete_gaussian_mechanism(
            self.sigma,
            sensitivity=self.sensitivity,
            value_discretization_interval=interval,
            use_connect_dots=True,
        )
        return one.self_compose(count)


@dataclass(frozen=True)
class ExponentialMechanism(Event):
    """Draws one outcome. If one unit is added or removed, the changes of all log-probabilities lie
    in an interval of length `range` (bounded range eta).

    The mechanism is eta-DP and eta^2/8-zCDP (Cesar and Rogers 2021). Adaptive draws are composed
    exactly (Dong, Durfee and Rogers 2020): their privacy loss distribution comes from the
    hockey-stick curve of the worst composition.
    Proof: docs/privacy.md, section 6.7.
    """

    range: float
    name: ClassVar[str] = "exponential_mechanism"

    def pure_epsilon(self) -> float:
        return self.range

    def zcdp_rho(self) -> float:
        return 0.125 * self.range**2

    def pld(self, interval: float, count: int) -> Pld:
        return draws_pld(self.range, count, interval)


@dataclass(frozen=True)
class AboveThreshold(Event):
    """Runs the sparse vector technique once, up to its first answer above the threshold.

    The mechanism is epsilon-DP (Dwork et al. 2009), so no worse than randomised response, which is
    discrete Laplace noise on one bit.
    """

    epsilon: float
    name: ClassVar[str] = "above_threshold"

    def pure_epsilon(self) -> float:
        return self.epsilon

    def rdp(self, orders: tuple[float, ...]) -> Array:
        return self._randomised_response().rdp(orders)

    def pld(self, interval: float, count: int) -> Pld:
        return self._randomised_response().pld(interval, count)

    def _randomised_response(self) -> DiscreteLaplace:
        # The rounded quotient may be too large; the next smaller float is not.
        return DiscreteLaplace(math.nextafter(1.0 / self.epsilon, 0.0), 1)


@dataclass(frozen=True)
class PoissonSubsampledGaussian(Event):
    """Applies a Gaussian mechanism to a batch that holds each unit independently with probability
    `sampling_probability` (one step of DP-SGD)."""

    sampling_probability: Probability
    noise_multiplier: float
    name: ClassVar[str] = "poisson_subsampled_gaussian"

    def zcdp_rho(self) -> float:
        mu = self.gaussian_mu()
        return math.inf if mu is None else 0.5 * mu**2

    def rdp(self, orders: tuple[float, ...]) -> Array:
        """Return dp-accounting's bounds or, if they are smaller, the chords between whole orders.

        At an order that is not whole, dp-accounting adds up the sizes of terms of both signs: with
        much noise its bound may be 72 times the divergence, or infinite. (order - 1) times the
        divergence is convex in the order and 0 at 1, so its chords are bounds, too.
        Proof: docs/privacy.md, section 6.1.
        """
        library = dp_accounting
        gaussian = library.GaussianDpEvent(self.noise_multiplier)
        sampled = library.PoissonSampledDpEvent(self.sampling_probability, gaussian)
        whole = sorted({side(order) for order in orders for side in (math.floor, math.ceil)} - {1})
        every = tuple(dict.fromkeys(map(float, (*orders, *whole))))
        found = dict(zip(every, _library_rdp(sampled, every), strict=True))
        moments = (np.array(whole) - 1.0) * [found[order] for order in whole]
        chords = np.interp(orders, [1, *whole], [0.0, *moments]) / (np.asarray(orders) - 1.0)
        smaller: Array = np.fmin([found[order] for order in orders], chords)
        return smaller

    def gaussian_mu(self) -> float | None:
        return 1.0 / self.noise_multiplier if self.sampling_probability == 1 else None

    def pld(self, interval: float, count: int) -> Pld:
        one = pld_library.from_gaussian_mechanism(
            self.noise_multiplier,
            value_discretization_interval=interval,
            sampling_prob=self.sampling_probability,
        )
        return one.self_compose(count)


@dataclass(frozen=True)
class PoissonSubsampledDraws(Event):
    """Makes `draws` adaptive draws of bounded range `range` (see `ExponentialMechanism`) on one
    secret batch: one text of private prediction with Poisson batches. The batch holds each unit
    independently with probability `sampling_probability`.
    Proof: docs/privacy.md, section 2.8.
    """

    sampling_probability: Probability
    range: float
    draws: int
    name: ClassVar[str] = "poisson_subsampled_draws"

    def pure_epsilon(self) -> float:
        """Return the loss of removing a unit, the larger one."""
        return subsampled_loss(self.draws * self.range, self.sampling_probability)

    def zcdp_rho(self) -> float:
        # A mixture is no farther from one of its parts than the other part is.
        return min(super().zcdp_rho(), 0.125 * self.draws * self.range**2)

    def rdp(self, orders: tuple[float, ...]) -> Array:
        if self.draws * self.range > MOST_LOSS:
            return super().rdp(orders)
        return np.minimum(super().rdp(orders), _worse_rdp(self, orders))

    def pld(self, interval: float, count: int) -> Pld:
        return _one_text(self, interval).self_compose(count)

    def curves(self) -> tuple[Curve, Curve]:
        """Return the curves of removing and of adding a unit."""
        return composed_draws(self.range, self.draws).poisson_subsampled(self.sampling_probability)


# Kept, because a search for the number of texts asks for them again and again.


@functools.lru_cache(maxsize=64)
def _worse_rdp(text: PoissonSubsampledDraws, orders: tuple[float, ...]) -> Array:
    removing, adding = text.curves()
    worse: Array = np.maximum(removing.rdp(orders), adding.rdp(orders))
    worse.flags.writeable = False
    return worse


@functools.lru_cache(maxsize=64)
def _one_text(text: PoissonSubsampledDraws, interval: float) -> Pld:
    removing, adding = (curve.pmf(interval) for curve in text.curves())
    return pld_library.PrivacyLossDistribution(removing, adding)


@functools.lru_cache(maxsize=256)
def _library_rdp(event: DpEvent, orders: tuple[float, ...]) -> Array:
    # dp-accounting's series stops at a relative error of 1e-13, so a divergence near zero may come
    # out negative.
    rdp: Array = np.maximum(dp_accounting.rdp.RdpAccountant(orders).compose(event).rdp, 1e-12)
    rdp.flags.writeable = False
    return rdp
