"""A gateway lets a request in when the coordinator has given it a place."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import dataclass

from dpray.serving.coordinator import Report, Shared
from dpray.serving.errors import ApiError, unavailable

_PAUSE_SECONDS = 0.1
_WAIT_SECONDS = 30.0
"""A request waits so long for a coordinator that answers, several times what Serve needs to start
one."""
logger = logging.getLogger("dpray.serving")


@dataclass(frozen=True, eq=False)
class _Ask:
    """Waits for the refusal of a place, or for None."""

    caller: str
    refusal: asyncio.Future[str | None]


class Admission:
    """Asks `coordinator` for places in the name of `gateway`, one report at a time.

    Reports never overtake each other and each is complete, so that a lost one does no harm: a place
    whose answer was lost is not in the next report, which gives it back.
    """

    def __init__(
        self, gateway: str, coordinator: Shared, wait_seconds: float = _WAIT_SECONDS
    ) -> None:
        self._gateway, self._coordinator, self._wait_seconds = gateway, coordinator, wait_seconds
        self._asks: list[_Ask] = []
        self._places: set[_Ask] = set()
        self._is_due = False
        self._reports: asyncio.Task[None] | None = None
        self.secret = secrets.token_bytes(32)
        """It is the secret of the cache salts: that of all gateways once a place was given."""

    @property
    def in_flight(self) -> int:
        return len(self._places)

    @asynccontextmanager
    async def place(self, caller: str) -> AsyncIterator[None]:
        """Hold a place for a request of `caller`.

        Raises ApiError 429 where a limit is reached, and 503 where the coordinator does not answer.
        """
        ask = _Ask(caller, asyncio.get_running_loop().create_future())
        self._asks.append(ask)
        self.report()
        try:
            try:
                async with asyncio.timeout(self._wait_seconds):
                    refusal = await ask.refusal
            except TimeoutError:
                raise unavailable("the limits cannot be checked now", "not_ready") from None
            if refusal is not None:
                raise ApiError(429, refusal, "rate_limit_exceeded", headers={"Retry-After": "1"})
            yield
        finally:
            # Also for a caller who went away between the coordinator's answer and this line.
            self._places.discard(ask)
            self.report()

    def report(self) -> None:
        """Have a report sent as soon as the one on its way is answered."""
        self._is_due = True
        if self._reports is None or self._reports.done():
            # In a context without a request: Serve cancels the calls of a request whose caller goes
            # away.
            self._reports = asyncio.create_task(self._send_reports(), context=Context())

    async def _send_reports(self) -> None:
        is_lost = False
        while self._is_due:
            self._is_due = False
            asks = self._asks = [each for each in self._asks if not each.refusal.done()]
            try:
                given = await self._exchange(tuple(asks))
            except Exception as error:
                if not is_lost:
                    logger.error("coordinator: %s", type(error).__name__)
                is_lost, given = True, False
            if not given:
                self._is_due = True
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _exchange(self, asks: tuple[_Ask, ...]) -> bool:
        """Send one report, and return whether its asks were answered."""
        in_flight = Counter(each.caller for each in self._places)
        callers = tuple(each.caller for each in asks)
        answer = await self._coordinator.exchange(
            Report(self._gateway, in_flight, callers, self.secret)
        )
        self.secret = answer.secret
        if answer.refusals is None:
            return False
        for ask, refusal in zip(asks, answer.refusals, strict=True):
            if not ask.refusal.done():
                if refusal is None:
                    self._places.add(ask)
                ask.refusal.set_result(refusal)
        return True
