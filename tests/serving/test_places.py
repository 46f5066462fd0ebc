"""Keys that share a model's places: none is kept waiting by another one's many requests."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Awaitable
from typing import Any

import pytest

from dpray.serving.places import Cost, FairPlaces

ALL = Cost(100, 32, 10_000)
ONE = Cost(1, 1, 10)


class Model:
    """Requests that hold their places until the test ends them, the first one first."""

    def __init__(self, places: FairPlaces) -> None:
        self.places = places
        self.running: dict[str, deque[asyncio.Event]] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def send(self, caller: str, cost: Cost = ONE, times: int = 1) -> None:
        for _ in range(times):
            self.tasks.append(asyncio.create_task(self._request(caller, cost)))
        await settle()

    async def _request(self, caller: str, cost: Cost) -> None:
        async with self.places.place(caller, cost):
            self.running.setdefault(caller, deque()).append(ended := asyncio.Event())
            await ended.wait()

    async def end(self, caller: str, times: int = 1) -> None:
        for _ in range(times):
            self.running[caller].popleft().set()
        await settle()

    @property
    def now(self) -> dict[str, int]:
        return {caller: len(each) for caller, each in self.running.items() if each}


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def run(scenario: Awaitable[Any]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


def test_one_busy_key_leaves_half_and_two_leave_a_third() -> None:
    async def scenario() -> None:
        model = Model(FairPlaces(ALL))
        await model.send("flood", times=200)
        assert model.now == {"flood": 16}
        await model.send("good")
        assert model.now == {"flood": 16, "good": 1}
        await model.send("second", times=200)
        # What the first holds beyond a third it holds until these requests end.
        assert model.now == {"flood": 16, "good": 1, "second": 7}
        await model.end("flood", times=16)
        assert model.now == {"flood": 10, "good": 1, "second": 10}
        await model.send("third")
        assert model.now["third"] == 1

    run(scenario())


def test_a_sole_key_has_all_places() -> None:
    async def scenario() -> None:
        model = Model(FairPlaces(ALL, sole=True))
        await model.send("only", times=200)
        assert model.now == {"only": 32}
        assert model.places.largest == ALL

    run(scenario())


@pytest.mark.parametrize(
    ("cost", "running"),
    [(Cost(10, 1, 1), 5), (Cost(1, 8, 1), 2), (Cost(1, 16, 1), 1), (Cost(1, 1, 1000), 5)],
)
def test_places_are_requests_sequences_and_tokens(cost: Cost, running: int) -> None:
    async def scenario() -> None:
        model = Model(FairPlaces(ALL))
        await model.send("flood", cost, times=50)
        assert model.now == {"flood": running}

    run(scenario())


def test_who_holds_least_goes_first_and_a_key_gets_its_requests_in_their_order() -> None:
    async def scenario() -> None:
        model = Model(FairPlaces(ALL))
        for key in ("a", "b"):
            await model.send(key, Cost(1, 8, 1), times=50)
        assert model.now == {"a": 2, "b": 1}
        # The most of any kind counts: c has few sequences and many tokens.
        await model.send("c", Cost(1, 1, 4000), times=50)
        assert model.now == {"a": 2, "b": 1, "c": 1}
        await model.end("a")
        assert model.now == {"a": 1, "b": 1, "c": 1}
        await model.end("a")
        assert model.now == {"a": 1, "b": 1, "c": 1}

    run(scenario())


def test_a_large_request_is_not_passed_for_ever() -> None:
    async def scenario() -> None:
        model = Model(FairPlaces(ALL))
        for key in ("b", "c"):
            await model.send(key, times=100)
        await model.end("b", times=model.now["b"] // 2)
        await model.send("large", Cost(1, 16, 1))
        await model.send("newcomer")
        for _ in range(40):
            if "large" in model.now:
                break
            assert "newcomer" not in model.now
            # Both send on, and end one request after the other.
            for key in ("b", "c"):
                if model.now.get(key):
                    await model.end(key)
        assert model.now["large"] == 1
        # They have not had to end all of theirs for it.
        assert model.now["b"] + model.now["c"] > 10
        # Who waited behind it is next.
        await model.end("b")
        assert model.now["newcomer"] == 1

    run(scenario())


@pytest.mark.parametrize("queued", [1, 50])
def test_keys_that_end_their_only_request_do_not_pass_a_large_one_for_ever(queued: int) -> None:
    async def scenario() -> None:
        model = Model(FairPlaces(Cost(100, 100, 100)))
        keys = ("k0", "k1", "k2")
        for key in keys:
            await model.send(key, Cost(1, 32, 1), times=1 + queued)
        assert model.now == dict.fromkeys(keys, 1)
        await model.send("good", Cost(1, 50, 1))
        for turn in range(6):
            # A key whose request ends has another one waiting, and sends one more.
            if model.now.get(key := keys[turn % 3]):
                await model.end(key)
                await model.send(key, Cost(1, 32, 1))
        assert model.now["good"] == 1
        await model.end("good")
        assert model.now == dict.fromkeys(keys, 1)

    run(scenario())


def test_a_caller_who_goes_away_keeps_no_place() -> None:
    async def scenario(turns: int) -> None:
        model = Model(FairPlaces(Cost(2, 2, 100)))
        await model.send("other")
        await model.send("other")
        leaves = asyncio.create_task(model._request("leaves", ONE))
        for _ in range(turns):
            await asyncio.sleep(0)
        leaves.cancel()
        await asyncio.wait([leaves])
        model.running.pop("leaves", None)
        await model.send("next")
        assert model.now == {"other": 1, "next": 1}

    for turns in range(5):
        run(scenario(turns))


def test_callers_who_go_away_at_once_keep_no_place() -> None:
    async def scenario() -> None:
        model = Model(FairPlaces(Cost(2, 2, 100)))
        for caller in ("a", "b"):
            await model.send(caller, times=2)
        for task in model.tasks:
            task.cancel()
        ended = await asyncio.gather(*model.tasks, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in ended)
        model.running.clear()
        for caller in ("c", "d"):
            await model.send(caller)
        assert model.now == {"c": 1, "d": 1}

    run(scenario())


def test_places_are_those_of_the_replicas_that_run() -> None:
    async def scenario() -> None:
        replicas = 3
        model = Model(FairPlaces(ALL, replicas=lambda: replicas))
        await model.send("flood", times=200)
        assert model.now == {"flood": 48}
        # A request has to fit in one of them.
        assert model.places.largest.sequences == 16
        replicas = 1
        await model.end("flood", times=30)
        await model.send("good")
        assert model.now == {"flood": 18, "good": 1}
        await model.end("flood", times=4)
        assert model.now == {"flood": 15, "good": 1}

    run(scenario())


@pytest.mark.parametrize("seed", range(5))
def test_limits_hold_and_everybody_is_served(seed: int) -> None:
    draw = random.Random(seed)

    async def scenario() -> None:
        places = FairPlaces(ALL)
        held: Counter[str] = Counter()
        served: Counter[str] = Counter()

        async def request(caller: str) -> None:
            cost = Cost(1, draw.choice((1, 1, 4, 16)), draw.choice((10, 5000)))
            async with places.place(caller, cost):
                held[caller] += cost.sequences
                assert held[caller] <= 16 and held.total() <= 32
                try:
                    for _ in range(draw.randrange(20)):
                        await asyncio.sleep(0)
                finally:
                    held[caller] -= cost.sequences
                served[caller] += 1

        sent = [asyncio.create_task(request(draw.choice("abcd"))) for _ in range(300)]
        leaving = draw.sample(sent, 60)
        for each in leaving:
            await asyncio.sleep(0)
            each.cancel()
        ended = await asyncio.gather(*sent, return_exceptions=True)
        assert not [each for each in ended if isinstance(each, AssertionError)]
        assert served.total() >= 240 and set(served) == set("abcd")
        assert held.total() == 0

    run(scenario())
