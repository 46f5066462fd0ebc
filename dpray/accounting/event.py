"""What every privacy event can say of itself, and the checks that events share."""

from __future__ import annotations

import json
import math
import numbers
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import fields
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution as Pld

Array = npt.NDArray[np.float64]


class Event(ABC):
    """One mechanism, or a composition of mechanisms, applied to the private data."""

    name: ClassVar[str]

    @abstractmethod
    def pure_epsilon(self) -> float:
        """The epsilon of pure differential privacy; `inf` if there is none."""

    @abstractmethod
    def zcdp_rho(self) -> float:
        """The rho of zero-concentrated differential privacy; `inf` if there is none."""

    @abstractmethod
    def rdp(self, orders: tuple[float, ...]) -> Array:
        """An upper bound on the Rényi divergence at each order (> 1), shape (len(orders),)."""

    def pld(self, interval: float, count: int) -> Pld | None:
        """A pessimistic privacy loss distribution of `count` compositions, discretised at
        `interval`; None where there is none that is worth having."""
        return None

    def gaussian_mu(self) -> float | None:
        """The mu of Gaussian differential privacy (Dong et al. 2022) if that describes the event
        exactly, else None."""
        return None

    def terms(self) -> Counter[Event]:
        """The event as a multiset of events that are not themselves sequential compositions."""
        return Counter({self: 1})

    def alternatives(self) -> tuple[Event, ...]:
        """The events of which a given privacy unit can meet one only; most events are their own."""
        return (self,)

    def to_json(self) -> dict[str, Any]:
        """The event's type and fields, sorted, in JSON types; `event_from_json` is the inverse."""
        values = {f.name: _json_value(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]
        return dict(sorted({"type": self.name, **values}.items()))


def canonical_json(event: Event) -> str:
    """One line that is the same for equal events, and different for others."""
    return json.dumps(event.to_json(), sort_keys=True, separators=(",", ":"))


def set_positive(event: Event, name: str) -> None:
    """Makes the field a float; raises ValueError unless it is a positive finite number."""
    value = getattr(event, name)
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be a positive finite number, got {value!r}")
    object.__setattr__(event, name, float(value))


def set_count(event: Event, name: str) -> None:
    """Makes the field an int; raises ValueError unless it is a positive integer."""
    value = getattr(event, name)
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    object.__setattr__(event, name, int(value))


def zcdp_and_pure_rdp(event: Event, orders: tuple[float, ...]) -> Array:
    """The Rényi bound of a pure mechanism: its rho times the order, and never over its epsilon."""
    return np.minimum(event.pure_epsilon(), event.zcdp_rho() * np.asarray(orders))


def _json_value(value: Any) -> Any:
    if isinstance(value, Event):
        return value.to_json()
    return [_json_value(v) for v in value] if isinstance(value, tuple) else value
