"""Keys share a model fairly: a request waits until the model has places for it.

A request takes places of three kinds at once (`Cost`). Whoever holds the least goes first, by the
share of the kind of which a key holds most (dominant resource fairness, Ghodsi et al., NSDI 2011).
After its first request a key gets no more than it leaves free (dynamic thresholds, Choudhury and
Hahne, 1998): one busy key has half of the places, two have a third each, and the next one finds
free ones at once unless its request is large or waits behind such a one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple


class Cost(NamedTuple):
    """Places: those that a request takes, or those that a model has."""

    requests: int
    sequences: int
    tokens: int

    def plus(self, other: Cost, times: int = 1) -> Cost:
        return Cost(*(mine + times * its for mine, its in zip(self, other, strict=True)))

    def fits(self, room: Cost) -> bool:
        return all(mine <= its for mine, its in zip(self, room, strict=True))


NOTHING = Cost(0, 0, 0)


class _Ask(NamedTuple):
    cost: Cost
    granted: asyncio.Future[None]


class FairPlaces:
    """The places of a model whose replicas have `of_replica` each.

    `sole` says that there is only one key, which may take all places. `replicas` returns how many
    replicas run; what is held is kept when one is lost.
    """

    def __init__(
        self, of_replica: Cost, sole: bool = False, replicas: Callable[[], int] = lambda: 1
    ) -> None:
        self._of_replica, self._sole, self._replicas = of_replica, sole, replicas
        self._held: dict[str, Cost] = {}
        self._waiting: dict[str, deque[_Ask]] = {}

    @property
    def largest(self) -> Cost:
        """Return the most that one request may cost: what a key alone may hold of one replica."""
        return self._of_replica if self._sole else Cost(*(each // 2 for each in self._of_replica))

    @asynccontextmanager
    async def place(self, caller: str, cost: Cost) -> AsyncIterator[None]:
        """Wait for places, and hold them. `cost` has to fit in `largest`."""
        ask = _Ask(cost, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(caller, deque()).append(ask)
        self._grant()
        try:
            await asyncio.shield(ask.granted)
            yield
        finally:
            # A caller who goes away may have been given its places a moment before.
            if ask.granted.done():
                self._give_back(caller, cost)
            else:
                self._forget(caller, ask)
            self._grant()

    def _grant(self) -> None:
        """Give free places to those who wait."""
        while (caller := self._next()) is not None:
            ask = self._waiting[caller][0]
            self._waiting[caller] = self._waiting.pop(caller)  # The others have their turn first.
            self._forget(caller, ask)
            self._held[caller] = self._held.get(caller, NOTHING).plus(ask.cost)
            ask.granted.set_result(None)

    def _next(self) -> str | None:
        """Return the caller whose first request gets its places now.

        Among equal shares it is the one who has waited longest since its last turn. If that one
        holds nothing and its request does not fit, nobody else gets more before it. So a large
        request waits for at most one request of each key ahead of it, and then for free places.
        """
        capacity = Cost(*(each * max(1, self._replicas()) for each in self._of_replica))
        free = capacity
        for held in self._held.values():
            free = free.plus(held, -1)
        for caller in sorted(self._waiting, key=lambda each: self._share(each, capacity)):
            cost, _ = self._waiting[caller][0]
            held = self._held.get(caller, NOTHING)
            left = free.plus(cost, -1)
            if cost.fits(free) and (self._sole or held == NOTHING or held.plus(cost).fits(left)):
                return caller
            if held == NOTHING:
                return None
        return None

    def _share(self, caller: str, capacity: Cost) -> float:
        held = self._held.get(caller, NOTHING)
        return max(mine / has for mine, has in zip(held, capacity, strict=True) if has)

    def _forget(self, caller: str, ask: _Ask) -> None:
        self._waiting[caller].remove(ask)
        if not self._waiting[caller]:
            del self._waiting[caller]

    def _give_back(self, caller: str, cost: Cost) -> None:
        left = self._held[caller].plus(cost, -1)
        if left == NOTHING:
            del self._held[caller]
        else:
            self._held[caller] = left
