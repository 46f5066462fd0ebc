"""Sequential and parallel compositions of events, and the JSON form of all events."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dpray.accounting.bounded_range import connected, hockey_stick
from dpray.accounting.event import Array, Event, pld_library
from dpray.accounting.events import (
    AboveThreshold,
    DiscreteGaussian,
    DiscreteLaplace,
    ExponentialMechanism,
    Gaussian,
    PoissonSubsampledDraws,
    PoissonSubsampledGaussian,
)
from dpray.types import ReadOnlyJson

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution as Pld

PARALLEL_LOSSES, PARALLEL_STEP = 2**14, 8
"""The curve of parallel events covers `PARALLEL_LOSSES` intervals on either side of epsilon 0, with
a point at each `PARALLEL_STEP`-th interval."""


class _Sequential(Event):
    """Bounds a sequential composition by sums over its terms. Each sum is rounded once: equal
    multisets of mechanisms have equal costs to the last bit."""

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

    def heaviest_part(self) -> Event:
        return SelfComposed(self.event.heaviest_part(), self.count)

    def terms(self) -> Counter[Event]:
        return Counter({event: self.count * n for event, n in self.event.terms().items()})


@dataclass(frozen=True)
class Composed(_Sequential):
    """Applies events one after the other, adaptively."""

    events: tuple[Event, ...]
    name: ClassVar[str] = "composed"

    def heaviest_part(self) -> Event:
        return Composed(tuple(event.heaviest_part() for event in self.events))

    def terms(self) -> Counter[Event]:
        total: Counter[Event] = Counter()
        for event in self.events:
            total.update(event.terms())
        return total


@dataclass(frozen=True)
class Parallel(Event):
    """Applies each event to its own part of the data; no unit is in two parts. A unit is affected
    by one event only, so every bound is that of the worst event.

    Later events may depend on the outputs of earlier ones. At every epsilon, the hockey-stick curve
    is the largest of the events' curves.
    """

    events: tuple[Event, ...]
    name: ClassVar[str] = "parallel"

    @staticmethod
    def of(events: Iterable[Event]) -> Event:
        """Return the events in parallel; a single event if all are equal."""
        different = tuple(dict.fromkeys(events))
        return different[0] if len(different) == 1 else Parallel(different)

    def heaviest_part(self) -> Event:
        heaviest = max(self.events, key=lambda event: (event.zcdp_rho(), event.pure_epsilon()))
        return heaviest.heaviest_part()

    def pure_epsilon(self) -> float:
        return max(event.pure_epsilon() for event in self.events)

    def zcdp_rho(self) -> float:
        return max(event.zcdp_rho() for event in self.events)

    def rdp(self, orders: tuple[float, ...]) -> Array:
        worst: Array = np.max([event.rdp(orders) for event in self.events], axis=0)
        return worst

    def pld(self, interval: float, count: int) -> Pld:
        grid = np.arange(-PARALLEL_LOSSES, PARALLEL_LOSSES + 1, PARALLEL_STEP)
        curves = []
        for event in self.events:
            parts = [part.pld(interval, n) for part, n in event.terms().items()]
            total = functools.reduce(lambda a, b: a.compose(b), parts)
            curves.append(hockey_stick(total, grid * interval))
        pmf = connected(interval, grid, np.max(curves, axis=0))
        # In each of the `count` compositions, another event may be the one that affects the unit.
        return pld_library.PrivacyLossDistribution(pmf).self_compose(count)


_TYPES: dict[str, type[Event]] = {
    cls.name: cls
    for cls in (
        Gaussian,
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


def event_from_json(value: ReadOnlyJson) -> Event:
    """Return the event that `to_json` wrote. Raises ValueError for an unknown type, a missing field
    or one too many."""
    if not isinstance(value, Mapping) or value.get("type") not in _TYPES:
        raise ValueError("not the JSON form of an event: unknown or missing 'type'")
    cls = _TYPES[value["type"]]
    names = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    if set(value) - {"type"} != names:
        raise ValueError(f"an event of type '{cls.name}' has the fields {sorted(names)}")
    return cls(**{name: _value_from_json(value[name]) for name in names})


def _value_from_json(value: object) -> object:
    if isinstance(value, Mapping):
        return event_from_json(value)
    return tuple(_value_from_json(v) for v in value) if isinstance(value, list) else value
