"""An `Event` describes a mechanism: a frozen value that knows its own privacy bounds.

Every event is stated for one neighbouring relation: add or remove one privacy unit. An event has
four bounds (pure, zero-concentrated, Rényi, privacy loss distribution), from which
`dpray.accounting.accountant` computes the cost of a whole plan. Composition may be adaptive
everywhere: a later mechanism may depend on the outputs of earlier ones.
"""

from __future__ import annotations

import json
import math
import numbers
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from dpray.extras import Late
from dpray.types import Json

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution as Pld

# Late: it takes a second, and an actor or a reader of the ledger needs none of it.
dp_accounting = Late("dp_accounting")
pld_library = Late("dp_accounting.pld.privacy_loss_distribution")

NEIGHBORING_RELATION = "add_or_remove_one"

Array = npt.NDArray[np.float64]

Probability = float
"""The annotation of an event's field that is above 0 and at most 1."""

MOMENT_ROUNDING = 1e-12
"""More than rounding takes from a computed log-moment, of which 6e-14 was found. A divergence that
rounds to 0 would make a mechanism free, however often it is composed."""

FFT_ROUNDING = 2.0**-50
"""An FFT that is raised to the power of a count rounds delta by up to 3e-16 for each mechanism."""

BOUNDS_VERSION = 2
"""The version of all bounds: a change of their numbers, other than by rounding, raises it."""


@lru_cache(maxsize=1)
def accountant_version() -> str:
    """Return what costs depend on besides the event: two charges of the same version state the same
    cost for an event, up to rounding."""
    return f"{BOUNDS_VERSION}, dp-accounting {version('dp-accounting')}"


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def canonical_json(value: object) -> str:
    """Return a value as JSON with sorted keys, no spaces, ASCII only, and floats in their shortest
    exact form. Raises ValueError for NaN and infinities."""
    return _ENCODER.encode(value)


class Event:
    """Describes one mechanism, or a composition of mechanisms, applied to the private data.

    Its fields are public parameters. The bounds of this class hold for every mechanism; subclasses
    have tighter ones. Raises ValueError for a parameter of the wrong type or range.
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

    def heaviest_part(self) -> Event:
        """Return the event with one part in the place of each parallel composition: the one that is
        expected to cost most. The event costs at least as much."""
        return self

    def terms(self) -> Counter[Event]:
        """Return the event as a multiset of events that are not themselves compositions."""
        return Counter({self: 1})

    def to_json(self) -> Json:
        """Return the event's type and fields, sorted, in JSON types; `event_from_json` is the
        inverse."""
        values = {f.name: _json_value(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]
        return dict(sorted({"type": self.name, **values}.items()))


def check_delta(delta: float) -> None:
    """Raise ValueError unless 0 <= delta < 1."""
    if not 0 <= delta < 1:
        raise ValueError(f"delta must be at least 0 and below 1, got {delta}")


def _json_value(value: object) -> object:
    if isinstance(value, Event):
        return value.to_json()
    return [_json_value(v) for v in value] if isinstance(value, tuple) else value


def _positive(name: str, value: object) -> float:
    number = float(value) if isinstance(value, numbers.Real) else math.nan
    if isinstance(value, bool) or not math.isfinite(number) or number <= 0:
        raise ValueError(f"{name} must be a positive finite number, got {value!r}")
    return number


def _probability(name: str, value: object) -> float:
    number = _positive(name, value)
    if number > 1:
        raise ValueError(f"{name} must be at most 1, got {number}")
    return number


def _count(name: str, value: object) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return int(value)


def _events(name: str, values: Iterable[Event]) -> tuple[Event, ...]:
    checked = tuple(values)
    if not checked or not all(isinstance(event, Event) for event in checked):
        raise ValueError(f"{name} must hold at least one event, and events only")
    return checked


_CHECKS: dict[str, Callable[..., object]] = {
    "float": _positive,
    "Probability": _probability,
    "int": _count,
    "Event": lambda name, value: _events(name, (value,))[0],
    "tuple[Event, ...]": _events,
}
"""Maps a field's annotation to the check of its value."""
