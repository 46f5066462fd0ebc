"""What happened to the data, as frozen values that know their own privacy bounds.

Every event is stated for one neighbouring relation: add or remove one privacy unit. An event says
what it costs under four bounds (pure, zero-concentrated, Rényi, privacy loss distribution); what a
whole plan costs is the business of `dpray.accounting.accountant`. Composition may be adaptive
everywhere: a later mechanism may depend on the outputs of earlier ones.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import dp_accounting
import numpy as np
from dp_accounting.pld import privacy_loss_distribution as plds
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution as Pld
from dp_accounting.rdp import RdpAccountant

from dpray.accounting.event import (
    Array,
    Event,
    canonical_json,
    set_count,
    set_positive,
    zcdp_and_pure_rdp,
)

__all__ = [
    "NEIGHBORING_RELATION",
    "AboveThreshold",
    "Composed",
    "DiscreteGaussian",
    "DiscreteLaplace",
    "Event",
    "ExponentialMechanism",
    "Gaussian",
    "Laplace",
    "Parallel",
    "PoissonSubsampledGaussian",
    "SelfComposed",
    "canonical_json",
    "event_from_json",
    "in_parallel",
]

NEIGHBORING_RELATION = "add_or_remove_one"

PLD_MOST_SHIFTS = 2**16
"""Above this a discrete Laplace mechanism's privacy loss distribution is made on a coarser grid."""


@dataclass(frozen=True)
class Gaussian(Event):
    """Gaussian noise of standard deviation noise_multiplier * L2 sensitivity."""

    noise_multiplier: float
    name: ClassVar[str] = "gaussian"

    def __post_init__(self) -> None:
        set_positive(self, "noise_multiplier")

    def pure_epsilon(self) -> float:
        return math.inf

    def zcdp_rho(self) -> float:
        return 0.5 / self.noise_multiplier**2

    def rdp(self, orders: tuple[float, ...]) -> Array:
        return self.zcdp_rho() * np.asarray(orders, dtype=np.float64)

    def gaussian_mu(self) -> float:
        return 1.0 / self.noise_multiplier

    def pld(self, interval: float, count: int) -> Pld:
        return plds.from_gaussian_mechanism(
            self.noise_multiplier / math.sqrt(count), value_discretization_interval=interval
        )


@dataclass(frozen=True)
class Laplace(Event):
    """Laplace noise of scale noise_multiplier * L1 sensitivity."""

    noise_multiplier: float
    name: ClassVar[str] = "laplace"

    def __post_init__(self) -> None:
        set_positive(self, "noise_multiplier")

    def pure_epsilon(self) -> float:
        return 1.0 / self.noise_multiplier

    def zcdp_rho(self) -> float:
        return 0.5 * self.pure_epsilon() ** 2

    def rdp(self, orders: tuple[float, ...]) -> Array:
        return _library_rdp(dp_accounting.LaplaceDpEvent(self.noise_multiplier), orders)

    def pld(self, interval: float, count: int) -> Pld:
        return plds.from_laplace_mechanism(
            self.noise_multiplier, value_discretization_interval=interval
        ).self_compose(count)


@dataclass(frozen=True)
class DiscreteLaplace(Event):
    """Integer noise with mass proportional to exp(-|x| / scale) on integer values that one unit
    changes by at most `sensitivity` in L1.

    The privacy loss distribution is that of one coordinate that changes by all of it. A change of
    several coordinates is a chain of shifts, one after the other, and never worse than the chain of
    the same shifts in one coordinate, whose trade-off function is just the chain's bound: discrete
    Laplace noise is log-concave (group privacy; Dong, Roth and Su 2022, Theorem 2.14).
    """

    scale: float
    sensitivity: int
    name: ClassVar[str] = "discrete_laplace"

    def __post_init__(self) -> None:
        set_positive(self, "scale")
        set_count(self, "sensitivity")

    def pure_epsilon(self) -> float:
        return self.sensitivity / self.scale

    def zcdp_rho(self) -> float:
        return 0.5 * self.pure_epsilon() ** 2

    def rdp(self, orders: tuple[float, ...]) -> Array:
        return zcdp_and_pure_rdp(self, orders)

    def pld(self, interval: float, count: int) -> Pld:
        coarse = self._coarse()
        return plds.from_discrete_laplace_mechanism(
            1.0 / coarse.scale,
            sensitivity=coarse.sensitivity,
            value_discretization_interval=interval,
            use_connect_dots=True,
        ).self_compose(count)

    def _coarse(self) -> DiscreteLaplace:
        """An event that is at least as bad, on a grid `step` times as coarse, whose distribution
        has few enough points.

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
    """Integer noise with mass proportional to exp(-x^2 / (2 sigma^2)) on integer values that one
    unit changes by at most `sensitivity` (Canonne, Kamath, Steinke 2020).

    `sensitivity` bounds the change in L1, so that one unit may put all of it on one coordinate:
    that is the worst case, and the one whose privacy loss distribution is used.
    """

    sigma: float
    sensitivity: int
    name: ClassVar[str] = "discrete_gaussian"

    def __post_init__(self) -> None:
        set_positive(self, "sigma")
        set_count(self, "sensitivity")

    def pure_epsilon(self) -> float:
        return math.inf

    def zcdp_rho(self) -> float:
        return 0.5 * (self.sensitivity / self.sigma) ** 2

    def rdp(self, orders: tuple[float, ...]) -> Array:
        return self.zcdp_rho() * np.asarray(orders, dtype=np.float64)

    def pld(self, interval: float, count: int) -> Pld:
        return plds.from_discrete_gaussian_mechanism(
            self.sigma,
            sensitivity=self.sensitivity,
            value_discretization_interval=interval,
            use_connect_dots=True,
        ).self_compose(count)


@dataclass(frozen=True)
class ExponentialMechanism(Event):
    """A draw whose log-probabilities, up to one common constant, move by amounts that span at most
    `range` when one unit is added or removed (bounded range eta).

    eta-DP and eta^2/8-zCDP (Cesar and Rogers 2021). It has no PLD: the pair that dominates every
    eta-DP mechanism has four times this rho, and the pointwise worst case over all bounded-range
    mechanisms, which is valid too, still costs more than zCDP for many draws (eta 0.0392, 1000
    draws, delta 1e-6: 3.35 against 3.06).
    """

    range: float
    name: ClassVar[str] = "exponential_mechanism"

    def __post_init__(self) -> None:
        set_positive(self, "range")

    def pure_epsilon(self) -> float:
        return self.range

    def zcdp_rho(self) -> float:
        return 0.125 * self.range**2

    def rdp(self, orders: tuple[float, ...]) -> Array:
        return zcdp_and_pure_rdp(self, orders)


@dataclass(frozen=True)
class AboveThreshold(Event):
    """One run of the sparse vector technique up to its first answer above the threshold.

    epsilon-DP (Dwork et al. 2009), hence epsilon^2/2-zCDP (Bun and Steinke 2016). It runs beside
    exponential mechanisms, which have no PLD, so it has none either.
    """

    epsilon: float
    name: ClassVar[str] = "above_threshold"

    def __post_init__(self) -> None:
        set_positive(self, "epsilon")

    def pure_epsilon(self) -> float:
        return self.epsilon

    def zcdp_rho(self) -> float:
        return 0.5 * self.epsilon**2

    def rdp(self, orders: tuple[float, ...]) -> Array:
        return zcdp_and_pure_rdp(self, orders)


@dataclass(frozen=True)
class PoissonSubsampledGaussian(Event):
    """A Gaussian mechanism on a batch that holds each unit independently with probability
    `sampling_probability` (one step of DP-SGD)."""

    sampling_probability: float
    noise_multiplier: float
    name: ClassVar[str] = "poisson_subsampled_gaussian"

    def __post_init__(self) -> None:
        set_positive(self, "sampling_probability")
        set_positive(self, "noise_multiplier")
        if self.sampling_probability > 1:
            raise ValueError(
                f"sampling_probability must be at most 1, got {self.sampling_probability}"
            )

    def pure_epsilon(self) -> float:
        return math.inf

    def zcdp_rho(self) -> float:
        mu = self.gaussian_mu()
        return math.inf if mu is None else 0.5 * mu**2

    def rdp(self, orders: tuple[float, ...]) -> Array:
        gaussian = dp_accounting.GaussianDpEvent(self.noise_multiplier)
        return _library_rdp(
            dp_accounting.PoissonSampledDpEvent(self.sampling_probability, gaussian), orders
        )

    def gaussian_mu(self) -> float | None:
        return 1.0 / self.noise_multiplier if self.sampling_probability == 1 else None

    def pld(self, interval: float, count: int) -> Pld:
        return plds.from_gaussian_mechanism(
            self.noise_multiplier,
            value_discretization_interval=interval,
            sampling_prob=self.sampling_probability,
        ).self_compose(count)


class _Sequential(Event):
    """Bounds of a sequential composition: sums over its terms, in an order of their own, so that
    equal multisets of mechanisms have equal costs to the last bit."""

    def pure_epsilon(self) -> float:
        return math.fsum(n * e.pure_epsilon() for e, n in self.terms().items())

    def zcdp_rho(self) -> float:
        return math.fsum(n * e.zcdp_rho() for e, n in self.terms().items())

    def rdp(self, orders: tuple[float, ...]) -> Array:
        rows = [n * e.rdp(orders) for e, n in self.terms().items()]
        return np.array([math.fsum(column) for column in zip(*rows, strict=True)])


@dataclass(frozen=True)
class SelfComposed(_Sequential):
    """`count` adaptive applications of one event."""

    event: Event
    count: int
    name: ClassVar[str] = "self_composed"

    def __post_init__(self) -> None:
        _check_events("event", (self.event,))
        set_count(self, "count")

    def terms(self) -> Counter[Event]:
        return Counter({event: self.count * n for event, n in self.event.terms().items()})


@dataclass(frozen=True)
class Composed(_Sequential):
    """Adaptive sequential composition of events."""

    events: tuple[Event, ...]
    name: ClassVar[str] = "composed"

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", _check_events("events", self.events))

    def terms(self) -> Counter[Event]:
        total: Counter[Event] = Counter()
        for event in self.events:
            total.update(event.terms())
        return total


@dataclass(frozen=True)
class Parallel(Event):
    """Events on disjoint parts of the data: which part a unit falls into depends on that unit and
    on public values alone, so the cost is the largest, under every bound (Amin et al., Lemma 2)."""

    events: tuple[Event, ...]
    name: ClassVar[str] = "parallel"

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", _check_events("events", self.events))

    def pure_epsilon(self) -> float:
        return max(event.pure_epsilon() for event in self.alternatives())

    def zcdp_rho(self) -> float:
        return max(event.zcdp_rho() for event in self.alternatives())

    def rdp(self, orders: tuple[float, ...]) -> Array:
        rows = np.stack([event.rdp(orders) for event in self.alternatives()])
        largest: Array = rows.max(axis=0)
        return largest

    def terms(self) -> Counter[Event]:
        distinct = self.alternatives()
        return distinct[0].terms() if len(distinct) == 1 else Counter({self: 1})

    def alternatives(self) -> tuple[Event, ...]:
        return tuple(dict.fromkeys(self.events))


def in_parallel(events: Iterable[Event]) -> Event:
    """`Parallel` without repeats: the event itself if all parts run the same one, so that a million
    equal batches are one event. Raises ValueError if there is none."""
    distinct = tuple(dict.fromkeys(events))
    return distinct[0] if len(distinct) == 1 else Parallel(distinct)


def event_from_json(value: Mapping[str, Any]) -> Event:
    """The event that `to_json` wrote. Raises ValueError for an unknown type, a missing field or one
    too many."""
    if not isinstance(value, Mapping) or value.get("type") not in _TYPES:
        raise ValueError("not the JSON form of an event: unknown or missing 'type'")
    cls = _TYPES[value["type"]]
    names = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    if set(value) - {"type"} != names:
        raise ValueError(f"an event of type '{cls.name}' has the fields {sorted(names)}")
    return cls(**{name: _value_from_json(value[name]) for name in names})


def _value_from_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return event_from_json(value)
    return tuple(_value_from_json(v) for v in value) if isinstance(value, list) else value


def _check_events(name: str, events: Iterable[Event]) -> tuple[Event, ...]:
    checked = tuple(events)
    if not checked or not all(isinstance(event, Event) for event in checked):
        raise ValueError(f"{name} must hold at least one event, and events only")
    return checked


@functools.lru_cache(maxsize=256)
def _library_rdp(event: dp_accounting.DpEvent, orders: tuple[float, ...]) -> Array:
    # The library's series stops at a relative 1e-13: a divergence that is all but zero comes out
    # as noise of that size, negative at some orders.
    rdp: Array = np.maximum(RdpAccountant(orders).compose(event).rdp, 1e-12)
    rdp.flags.writeable = False
    return rdp


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
        SelfComposed,
        Composed,
        Parallel,
    )
}
