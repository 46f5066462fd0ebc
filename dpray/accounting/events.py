"""An `Event` says what was done to the data: a frozen value that knows its own privacy bounds.

Every event is stated for one neighbouring relation: add or remove one privacy unit. An event knows
what it costs under four bounds (pure, zero-concentrated, Rényi, privacy loss distribution);
`dpray.accounting.accountant` says what a whole plan costs. Composition may be adaptive everywhere:
a later mechanism may depend on the outputs of earlier ones.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from dp_accounting import DpEvent
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution as Pld

    from dpray.accounting.bounded_range import Curve

NEIGHBORING_RELATION = "add_or_remove_one"

PLD_MOST_SHIFTS = 2**14
"""A discrete Laplace mechanism with more shifts gets its privacy loss distribution on a coarser
grid."""

MOST_LOSS = 700.0
"""The exponential of a larger loss is no float64."""

PARALLEL_LOSSES, PARALLEL_STEP = 2**14, 8
"""The curve of events in parallel has a point at each `PARALLEL_STEP`-th interval, up to
`PARALLEL_LOSSES` of them on either side of epsilon 0."""

Array = npt.NDArray[np.float64]


class Event:
    """Describes one mechanism, or a composition of mechanisms, applied to the private data.

    Its fields are public parameters. The bounds given here hold for every mechanism; an event
    states the tighter ones that it has. Raises ValueError for a parameter that is not of its kind.
    """

    name: ClassVar[str]

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]
            checked = _CHECKS[str(f.type)](f.name, getattr(self, f.name))
            object.__setattr__(self, f.name, checked)

    def pure_epsilon(self) -> float:
        """Return the epsilon of pure differential privacy; `inf` if there is none."""
        return math.inf

    def zcdp_rho(self) -> float:
        """Return the rho of zero-concentrated differential privacy; `inf` if there is none. The
        default is epsilon^2/2, which holds for every epsilon-DP mechanism (Bun and Steinke
        2016)."""
        return 0.5 * self.pure_epsilon() ** 2

    def rdp(self, orders: tuple[float, ...]) -> Array:
        """Return an upper bound on the Rényi divergence at each order (> 1), shape (len(orders),).
        The default is rho times the order, and never more than the pure epsilon."""
        return np.minimum(self.pure_epsilon(), self.zcdp_rho() * np.asarray(orders))

    def pld(self, interval: float, count: int) -> Pld:
        """Return a pessimistic privacy loss distribution of `count` compositions, discretised at
        `interval`."""
        raise NotImplementedError

    def gaussian_mu(self) -> float | None:
        """Return the mu of Gaussian differential privacy (Dong et al. 2022) if that describes the
        event exactly, else None."""
        return None

    def terms(self) -> Counter[Event]:
        """Return the event as a multiset of events that are not themselves compositions."""
        return Counter({self: 1})

    def to_json(self) -> dict[str, Any]:
        """Return the event's type and fields, sorted, in JSON types; `event_from_json` is the
        inverse."""
        values = {f.name: _json_value(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]
        return dict(sorted({"type": self.name, **values}.items()))


@dataclass(frozen=True)
class Gaussian(Event):
    """Adds Gaussian noise of standard deviation noise_multiplier * L2 sensitivity."""

    noise_multiplier: float
    name: ClassVar[str] = "gaussian"

    def zcdp_rho(self) -> float:
        return 0.5 / self.noise_multiplier**2

    def gaussian_mu(self) -> float:
        return 1.0 / self.noise_multiplier

    def pld(self, interval: float, count: int) -> Pld:
        return _losses().from_gaussian_mechanism(
            self.noise_multiplier / math.sqrt(count), value_discretization_interval=interval
        )


@dataclass(frozen=True)
class Laplace(Event):
    """Adds Laplace noise of scale noise_multiplier * L1 sensitivity."""

    noise_multiplier: float
    name: ClassVar[str] = "laplace"

    def pure_epsilon(self) -> float:
        return 1.0 / self.noise_multiplier

    def rdp(self, orders: tuple[float, ...]) -> Array:
        from dp_accounting import LaplaceDpEvent

        return _library_rdp(LaplaceDpEvent(self.noise_multiplier), orders)

    def pld(self, interval: float, count: int) -> Pld:
        one = _losses().from_laplace_mechanism(
            self.noise_multiplier, value_discretization_interval=interval
        )
        return one.self_compose(count)


@dataclass(frozen=True)
class DiscreteLaplace(Event):
    """Adds integer noise with mass proportional to exp(-|x| / scale) to integer values that one
    unit changes by at most `sensitivity` in L1.

    The privacy loss distribution is that of one coordinate that changes by all of it, which is the
    worst case. Where no coordinate changes by more than m, and all of them by n m at most, the
    worst are n coordinates that change by m: `SelfComposed(DiscreteLaplace(scale, m), n)`.
    Proof: docs/privacy.md, section 6.8.
    """

    scale: float
    sensitivity: int
    name: ClassVar[str] = "discrete_laplace"

    def pure_epsilon(self) -> float:
        return self.sensitivity / self.scale

    def rdp(self, orders: tuple[float, ...]) -> Array:
        """Return the closed form for a shift by S = `sensitivity`. With a = 1 / scale, the loss is
        a S at x <= 0, a (S - 2x) at x = 1, ..., S-1, and -a S at x >= S."""
        alpha, a, S = np.asarray(orders), 1.0 / self.scale, self.sensitivity
        log_r = -a * (2 * alpha - 1)
        ends = (1 + np.exp(S * log_r)) / (1 + math.exp(-a))
        inner = np.expm1((S - 1) * log_r) / np.expm1(log_r) * np.exp(log_r)
        moment = ends + math.tanh(a / 2) * inner
        found: Array = np.maximum(a * S + np.log(moment) / (alpha - 1), 0.0)
        return found

    def pld(self, interval: float, count: int) -> Pld:
        coarse = self._coarse()
        one = _losses().from_discrete_laplace_mechanism(
            1.0 / coarse.scale,
            sensitivity=coarse.sensitivity,
            value_discretization_interval=interval,
            use_connect_dots=True,
        )
        return one.self_compose(count)

    def _coarse(self) -> DiscreteLaplace:
        """Return an event that is at least as bad, on a grid `step` times as coarse, whose
        distribution has few enough points.

        A shift by `step` is step/scale-DP, so no worse than a shift by 1 under noise of scale
        scale/step, which is randomised response; and so is the chain of such shifts.
        """
        step = -(-self.sensitivity // PLD_MOST_SHIFTS)
        if step == 1:
            return self
        # One rounding of the quotient would be on the wrong side by half a unit in the last place.
        scale = math.nextafter(self.scale / step, 0.0)
        return DiscreteLaplace(scale, -(-self.sensitivity // step))


@dataclass(frozen=True)
class DiscreteGaussian(Event):
    """Adds integer noise with mass proportional to exp(-x^2 / (2 sigma^2)) to integer values that
    one unit changes by at most `sensitivity` (Canonne, Kamath, Steinke 2020).

    `sensitivity` bounds the change in L1, so that one unit may put all of it on one coordinate:
    that is the worst case, and the one whose privacy loss distribution is used.
    """

    sigma: float
    sensitivity: int
    name: ClassVar[str] = "discrete_gaussian"

    def zcdp_rho(self) -> float:
        return 0.5 * (self.sensitivity / self.sigma) ** 2

    def pld(self, interval: float, count: int) -> Pld:
        one = _losses().from_discrete_gaussian_mechanism(
            self.sigma,
            sensitivity=self.sensitivity,
            value_discretization_interval=interval,
            use_connect_dots=True,
        )
        return one.self_compose(count)


@dataclass(frozen=True)
class ExponentialMechanism(Event):
    """Draws with log-probabilities that, up to one common constant, move by amounts that span at
    most `range` when one unit is added or removed (bounded range eta).

    The mechanism is eta-DP and eta^2/8-zCDP (Cesar and Rogers 2021). Draws that may depend on the
    ones before them are composed exactly (Dong, Durfee and Rogers 2020): their privacy loss
    distribution is that of the pair whose hockey-stick curve is that of the worst composition.
    Proof: docs/privacy.md, section 6.7.
    """

    range: float
    name: ClassVar[str] = "exponential_mechanism"

    def pure_epsilon(self) -> float:
        return self.range

    def zcdp_rho(self) -> float:
        return 0.125 * self.range**2

    def pld(self, interval: float, count: int) -> Pld:
        from dpray.accounting.bounded_range import BLOCK, composed_draws

        def composed(draws: int) -> Pld:
            pmf = composed_draws(self.range, draws).pmf(interval)
            return _losses().PrivacyLossDistribution(pmf)

        # A block of draws, as a whole, is one mechanism, which its curve describes.
        blocks, rest = divmod(count, BLOCK)
        if blocks == 0:
            return composed(rest)
        total = composed(BLOCK).self_compose(blocks)
        return total.compose(composed(rest)) if rest else total


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
        # One rounding of the quotient would be on the wrong side by half a unit in the last place.
        return DiscreteLaplace(math.nextafter(1.0 / self.epsilon, 0.0), 1)


@dataclass(frozen=True)
class PoissonSubsampledGaussian(Event):
    """Applies a Gaussian mechanism to a batch that holds each unit independently with probability
    `sampling_probability` (one step of DP-SGD)."""

    sampling_probability: float
    noise_multiplier: float
    name: ClassVar[str] = "poisson_subsampled_gaussian"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_probability(self.sampling_probability)

    def zcdp_rho(self) -> float:
        mu = self.gaussian_mu()
        return math.inf if mu is None else 0.5 * mu**2

    def rdp(self, orders: tuple[float, ...]) -> Array:
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

        gaussian = GaussianDpEvent(self.noise_multiplier)
        return _library_rdp(PoissonSampledDpEvent(self.sampling_probability, gaussian), orders)

    def gaussian_mu(self) -> float | None:
        return 1.0 / self.noise_multiplier if self.sampling_probability == 1 else None

    def pld(self, interval: float, count: int) -> Pld:
        one = _losses().from_gaussian_mechanism(
            self.noise_multiplier,
            value_discretization_interval=interval,
            sampling_prob=self.sampling_probability,
        )
        return one.self_compose(count)


@dataclass(frozen=True)
class PoissonSubsampledDraws(Event):
    """Makes `draws` adaptive draws of bounded range `range` (see `ExponentialMechanism`) on one
    secret batch, which holds each unit independently with probability `sampling_probability`: one
    text of private prediction with Poisson batches.
    Proof: docs/privacy.md, section 2.8.
    """

    sampling_probability: float
    range: float
    draws: int
    name: ClassVar[str] = "poisson_subsampled_draws"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_probability(self.sampling_probability)

    def pure_epsilon(self) -> float:
        """Return the loss of removing a unit, the larger one."""
        from dpray.accounting.bounded_range import subsampled_loss

        return subsampled_loss(self.draws * self.range, self.sampling_probability)

    def zcdp_rho(self) -> float:
        # A mixture is no farther from one of its parts than the other part is.
        return min(super().zcdp_rho(), 0.125 * self.draws * self.range**2)

    def rdp(self, orders: tuple[float, ...]) -> Array:
        if self.draws * self.range > MOST_LOSS:
            return super().rdp(orders)
        removing, adding = self._curves()
        worse: Array = np.maximum(removing.rdp(orders), adding.rdp(orders))
        return np.minimum(super().rdp(orders), worse)

    def pld(self, interval: float, count: int) -> Pld:
        removing, adding = (curve.pmf(interval) for curve in self._curves())
        return _losses().PrivacyLossDistribution(removing, adding).self_compose(count)

    def _curves(self) -> tuple[Curve, Curve]:
        from dpray.accounting.bounded_range import composed_draws

        return composed_draws(self.range, self.draws).poisson_subsampled(self.sampling_probability)


class _Sequential(Event):
    """Bounds a sequential composition by sums over its terms, rounded once, so that equal multisets
    of mechanisms have equal costs to the last bit."""

    def pure_epsilon(self) -> float:
        return math.fsum(n * e.pure_epsilon() for e, n in self.terms().items())

    def zcdp_rho(self) -> float:
        return math.fsum(n * e.zcdp_rho() for e, n in self.terms().items())

    def rdp(self, orders: tuple[float, ...]) -> Array:
        rows = [n * e.rdp(orders) for e, n in self.terms().items()]
        return np.array([math.fsum(column) for column in zip(*rows, strict=True)])

    def gaussian_mu(self) -> float | None:
        """Return the root of the sum of the terms' squared mu (Dong et al. 2022, Corollary 3.3)."""
        mus = [(event.gaussian_mu(), count) for event, count in self.terms().items()]
        squares = [count * mu**2 for mu, count in mus if mu is not None]
        return math.sqrt(math.fsum(squares)) if len(squares) == len(mus) else None


@dataclass(frozen=True)
class SelfComposed(_Sequential):
    """Applies one event `count` times, adaptively."""

    event: Event
    count: int
    name: ClassVar[str] = "self_composed"

    def terms(self) -> Counter[Event]:
        return Counter({event: self.count * n for event, n in self.event.terms().items()})


@dataclass(frozen=True)
class Composed(_Sequential):
    """Applies events one after the other, adaptively."""

    events: tuple[Event, ...]
    name: ClassVar[str] = "composed"

    def terms(self) -> Counter[Event]:
        total: Counter[Event] = Counter()
        for event in self.events:
            total.update(event.terms())
        return total


@dataclass(frozen=True)
class Parallel(Event):
    """Applies each event to a part of the data that has no unit in common with the others'. A unit
    meets one of them, so every bound is that of the worst event.

    The later parts may depend on what the earlier ones released. The hockey-stick curve is the
    largest of the events' at every epsilon.
    """

    events: tuple[Event, ...]
    name: ClassVar[str] = "parallel"

    @staticmethod
    def of(events: Iterable[Event]) -> Event:
        """Return the one event, where all are equal."""
        different = tuple(dict.fromkeys(events))
        return different[0] if len(different) == 1 else Parallel(different)

    def pure_epsilon(self) -> float:
        return max(event.pure_epsilon() for event in self.events)

    def zcdp_rho(self) -> float:
        return max(event.zcdp_rho() for event in self.events)

    def rdp(self, orders: tuple[float, ...]) -> Array:
        worst: Array = np.max([event.rdp(orders) for event in self.events], axis=0)
        return worst

    def pld(self, interval: float, count: int) -> Pld:
        from dpray.accounting.bounded_range import connected

        losses = np.arange(-PARALLEL_LOSSES, PARALLEL_LOSSES + 1, PARALLEL_STEP)
        curves = []
        for event in self.events:
            parts = [part.pld(interval, n) for part, n in event.terms().items()]
            total = functools.reduce(lambda a, b: a.compose(b), parts)
            curves.append(total.get_delta_for_epsilon(losses * interval))
        pmf = connected(interval, losses, np.max(curves, axis=0))
        # The worst of all, and then again: a unit may meet another event each time.
        return _losses().PrivacyLossDistribution(pmf).self_compose(count)


_TYPES: dict[str, type[Event]] = {
    cls.name: cls
    for cls in (
        Gaussian,
        Laplace,
        DiscreteLaplace,
        DiscreteGaussian,
        ExponentialMechanism,
        AboveThreshold,
        PoissonSubsampledGaussian,
        PoissonSubsampledDraws,
        SelfComposed,
        Composed,
        Parallel,
    )
}


def event_from_json(value: Mapping[str, Any]) -> Event:
    """Return the event that `to_json` wrote. Raises ValueError for an unknown type, a missing field
    or one too many."""
    if not isinstance(value, Mapping) or value.get("type") not in _TYPES:
        raise ValueError("not the JSON form of an event: unknown or missing 'type'")
    cls = _TYPES[value["type"]]
    names = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    if set(value) - {"type"} != names:
        raise ValueError(f"an event of type '{cls.name}' has the fields {sorted(names)}")
    return cls(**{name: _value_from_json(value[name]) for name in names})


def _check_probability(sampling_probability: float) -> None:
    if sampling_probability > 1:
        raise ValueError(f"sampling_probability must be at most 1, got {sampling_probability}")


def check_delta(delta: float) -> None:
    """Raise ValueError unless 0 <= delta < 1."""
    if not 0 <= delta < 1:
        raise ValueError(f"delta must be at least 0 and below 1, got {delta}")


def _json_value(value: Any) -> Any:
    if isinstance(value, Event):
        return value.to_json()
    return [_json_value(v) for v in value] if isinstance(value, tuple) else value


def _value_from_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return event_from_json(value)
    return tuple(_value_from_json(v) for v in value) if isinstance(value, list) else value


def _positive(name: str, value: Any) -> float:
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be a positive finite number, got {value!r}")
    return float(value)


def _count(name: str, value: Any) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return int(value)


def _events(name: str, values: Iterable[Event]) -> tuple[Event, ...]:
    checked = tuple(values)
    if not checked or not all(isinstance(event, Event) for event in checked):
        raise ValueError(f"{name} must hold at least one event, and events only")
    return checked


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "float": _positive,
    "int": _count,
    "Event": lambda name, value: _events(name, (value,))[0],
    "tuple[Event, ...]": _events,
}
"""Maps a field's type, as it is written, to the check of its value."""


def _losses() -> Any:
    """Import dp-accounting's privacy loss distributions only when one is needed: reading a ledger
    needs none."""
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution


@functools.lru_cache(maxsize=256)
def _library_rdp(event: DpEvent, orders: tuple[float, ...]) -> Array:
    from dp_accounting.rdp import RdpAccountant

    # The library's series stops at a relative 1e-13: a divergence that is all but zero comes out
    # as noise of that size, negative at some orders.
    rdp: Array = np.maximum(RdpAccountant(orders).compose(event).rdp, 1e-12)
    rdp.flags.writeable = False
    return rdp
