"""The coordinator holds what all gateways share: requests in flight, salt secret and metrics.

A gateway reports all its requests in flight at once, one report at a time and at least once in
RENEWAL_SECONDS, and its report asks for places for the requests that have come in. A report is a
lease: when a gateway dies, its last report expires after LEASE_SECONDS and its places go to others.
A gateway that merely could not report for so long (a stopped process, a lost network) goes on with
its requests, so that the limits may be exceeded until its next report, which counts them anew.

Everything is in memory. When the coordinator dies, Serve starts another. Requests under way go on,
and new ones wait for it: none is let in uncounted. The new coordinator answers nobody until each
gateway has reported, or until LEASE_SECONDS have passed, in which every living one has. So it knows
all requests in flight before it gives a place away, and the limits hold across its death.

A single gateway has a coordinator in its own process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Generic, Protocol, TypeVar

from dpray.serving.metrics import Families
from dpray.serving.settings import LimitsConfig

RENEWAL_SECONDS = 1.0
LEASE_SECONDS = 5.0
"""A gateway that is silent for longer is taken for dead."""

T = TypeVar("T")


@dataclass(frozen=True)
class Report:
    """A gateway's requests in flight by caller, and the callers of those that wait."""

    gateway: str
    in_flight: Mapping[str, int]
    asks: tuple[str, ...]
    secret: bytes = field(repr=False)
    """It is the secret of the cache salts that the gateway has."""


@dataclass(frozen=True)
class Answer:
    """The refusal of each ask, None for a place that was given; and the secret of all."""

    refusals: tuple[str | None, ...] | None
    """Without them, the coordinator does not know all requests in flight yet: ask later."""
    secret: bytes = field(repr=False)


class Shared(Protocol):
    """A gateway sees the coordinator like this, in its own process or in another."""

    async def exchange(self, report: Report) -> Answer: ...

    async def publish(self, gateway: str, families: Families) -> Mapping[str, Families]: ...


class Coordinator:
    """Counts the requests in flight of `gateways` gateways, in total and for each caller."""

    def __init__(
        self, limits: LimitsConfig, gateways: int = 1, clock: Callable[[], float] = monotonic
    ) -> None:
        self._limits, self._gateways = limits, gateways
        self._clock, self._started = clock, clock()
        self._knows_all = False
        self._in_flight = _Leases[Counter[str]](clock)
        self._families = _Leases[Families](clock)
        self._secret = b""

    async def exchange(self, report: Report) -> Answer:
        """Replace the gateway's report, and answer its asks.

        The first secret that is reported is that of all gateways. A new coordinator gets it from
        the gateways that live, which all have the same.
        """
        self._secret = self._secret or report.secret
        self._in_flight.put(report.gateway, Counter(report.in_flight))
        self._knows_all = (
            self._knows_all
            or len(self._in_flight.living()) >= self._gateways
            or self._clock() >= self._started + LEASE_SECONDS
        )
        if not self._knows_all:
            return Answer(None, self._secret)
        return Answer(
            tuple(self._refusal(report.gateway, each) for each in report.asks), self._secret
        )

    def _refusal(self, gateway: str, caller: str) -> str | None:
        """Give a place and return None, or return the reason why there is none."""
        in_flight = self._in_flight.living()
        if sum(each.total() for each in in_flight.values()) >= self._limits.max_in_flight:
            return "too many requests in flight"
        of_caller = sum(each[caller] for each in in_flight.values())
        if of_caller >= self._limits.max_in_flight_per_key:
            return "too many requests of this key in flight"
        in_flight[gateway][caller] += 1
        return None

    async def publish(self, gateway: str, families: Families) -> Mapping[str, Families]:
        """Replace the gateway's metrics, and return those of all gateways that live."""
        self._families.put(gateway, families)
        return self._families.living()


class _Leases(Generic[T]):
    """Keeps what each gateway said last, for LEASE_SECONDS."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[str, tuple[float, T]] = {}

    def put(self, gateway: str, value: T) -> None:
        self._held[gateway] = (self._clock() + LEASE_SECONDS, value)

    def living(self) -> dict[str, T]:
        now = self._clock()
        self._held = {name: each for name, each in self._held.items() if each[0] > now}
        return {name: value for name, (_, value) in self._held.items()}
