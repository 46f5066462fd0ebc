"""Several gateways share limits that hold for all of them together, one secret and one page."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from starlette.responses import JSONResponse, Response

from dpray.serving.admission import Admission
from dpray.serving.coordinator import LEASE_SECONDS, Answer, Coordinator, Report
from dpray.serving.errors import ApiError
from dpray.serving.gateway import Caller
from dpray.serving.metrics import Families
from dpray.serving.settings import LimitsConfig
from tests.serving.front import CHAT, KEY, OTHER, ask, gateway, http, in_flight, requests, samples

ONE = LimitsConfig(max_in_flight=1)
FIVE_AND_THREE = LimitsConfig(max_in_flight=5, max_in_flight_per_key=3)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Behind:
    """A coordinator behind a network: it may be dead, and an answer may get lost."""

    def __init__(self, coordinator: Coordinator | None) -> None:
        self.coordinator = coordinator
        self.loses_answers = False

    async def exchange(self, report: Report) -> Answer:
        await asyncio.sleep(0)
        if self.coordinator is None:
            raise ActorDiedError()
        answer = await self.coordinator.exchange(report)
        await asyncio.sleep(0)
        if self.loses_answers:
            raise ActorDiedError()
        return answer

    async def publish(self, gateway: str, families: Families) -> Mapping[str, Families]:
        raise ActorDiedError()


def run(scenario: Awaitable[Any]) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, 60))


async def tried(admission: Admission, caller: str = "0") -> int:
    """The status of a request that takes no time."""
    try:
        async with admission.place(caller):
            return 200
    except ApiError as error:
        return error.status


async def settled(*admissions: Admission) -> None:
    """Each of them has reported, to a coordinator that answers, and so has each that had to."""
    for each in admissions:
        each.report()
    for _ in range(30):
        await asyncio.sleep(0)


async def let_in(coordinators: Sequence[Coordinator | None]) -> list[int]:
    """How many of ten requests of each key are let in at once, sent to a gateway for each of the
    coordinators in turns; None is a gateway by itself."""
    go, begun = asyncio.Event(), {KEY: 0, OTHER: 0}

    async def wait(body: dict[str, Any], caller: Caller) -> Response:
        begun[body["key"]] += 1
        await go.wait()
        return JSONResponse({})

    limits = FIVE_AND_THREE.model_dump()
    apps = [gateway(wait, coordinator=each, limits=limits) for each in coordinators]
    async with AsyncExitStack() as stack:
        sent = []
        for key in begun:
            clients = [await stack.enter_async_context(http(app, key)) for app in apps]
            posts = (clients[n % len(clients)].post(CHAT, json={"key": key}) for n in range(10))
            sent += [asyncio.create_task(post) for post in posts]
        while sum(begun.values()) + sum(each.done() for each in sent) < len(sent):
            await asyncio.sleep(0.01)
        at_once = list(begun.values())
        go.set()
        statuses = [(await each).status_code for each in sent]
    assert (statuses.count(200), statuses.count(429)) == (sum(at_once), 20 - sum(at_once))
    return at_once


@pytest.mark.parametrize("gateways", [1, 2, 3])
def test_the_limits_hold_over_all_gateways_and_not_for_each(gateways: int) -> None:
    shared = Coordinator(FIVE_AND_THREE, gateways)
    assert run(let_in([shared] * gateways)) == [3, 2]
    # Gateways that share nothing let in more: this test would see it.
    assert run(let_in([None] * gateways)) == {1: [3, 2], 2: [6, 4], 3: [9, 6]}[gateways]


def test_a_place_that_one_gateway_gives_back_goes_to_another() -> None:
    async def scenario() -> None:
        shared = Coordinator(ONE, 2)
        one, two = Admission("one", shared), Admission("two", shared)
        await settled(one, two)
        async with one.place("0"):
            assert await tried(two) == 429
        await settled()
        assert await tried(two) == 200

    run(scenario())


def test_the_places_of_a_dead_gateway_come_back_and_those_of_a_living_one_do_not() -> None:
    async def scenario(is_dead: bool) -> list[int]:
        clock = Clock()
        shared = Coordinator(ONE, 2, clock)
        first, living = Admission("first", shared), Admission("living", shared)
        await settled(first, living)
        seen = []
        async with first.place("0"):
            await settled(first)
            for _ in range(3):
                clock.now += 0.45 * LEASE_SECONDS
                await settled(*([] if is_dead else [first]))
                seen.append(await tried(living))
        return seen

    assert run(scenario(is_dead=True)) == [429, 429, 200]
    assert run(scenario(is_dead=False)) == [429, 429, 429]


@pytest.mark.parametrize(
    # As if there were one gateway, the new coordinator would not know of the other's request.
    ("gateways", "status"),
    [(2, 429), (1, 200)],
)
def test_a_new_coordinator_knows_all_requests_in_flight_before_it_gives_a_place(
    gateways: int, status: int
) -> None:
    async def scenario() -> None:
        shared = Behind(Coordinator(ONE, 2))
        one, two = Admission("one", shared), Admission("two", shared)
        await settled(one, two)
        async with one.place("0"):
            shared.coordinator = None
            waits = asyncio.create_task(tried(two))
            await asyncio.sleep(0.3)
            assert not waits.done()
            shared.coordinator = Coordinator(ONE, gateways)
            if gateways == 2:
                await asyncio.sleep(0.3)
                assert not waits.done()
                await settled(one)
            assert await waits == status
        await settled(one)
        assert await tried(two) == 200

    run(scenario())


def test_a_new_coordinator_does_not_wait_for_a_gateway_that_died_too() -> None:
    async def scenario() -> None:
        clock = Clock()
        survivor = Admission("survivor", Coordinator(ONE, 2, clock))
        waits = asyncio.create_task(tried(survivor))
        await asyncio.sleep(0.3)
        assert not waits.done()
        clock.now += LEASE_SECONDS
        assert await waits == 200

    run(scenario())


def test_a_request_does_not_wait_for_ever_for_a_coordinator() -> None:
    async def scenario() -> None:
        shared = Behind(None)
        admission = Admission("one", shared, wait_seconds=0.05)
        with pytest.raises(ApiError) as refused:
            async with admission.place("0"):
                raise AssertionError
        assert (refused.value.status, refused.value.code) == (503, "not_ready")
        # It holds no place when there is one.
        shared.coordinator = Coordinator(ONE)
        assert await tried(Admission("two", shared)) == 200

    run(scenario())


def test_a_caller_who_goes_away_while_its_place_is_given_keeps_none() -> None:
    async def scenario(turns: int) -> int:
        shared = Coordinator(ONE)
        admission = Admission("one", Behind(shared))
        caller = asyncio.create_task(tried(admission))
        for _ in range(turns):
            await asyncio.sleep(0)
        caller.cancel()
        await asyncio.wait([caller])
        await settled()
        assert admission.in_flight == 0
        return await tried(Admission("two", shared))

    # The coordinator's answer comes after the third turn of the event loop or so.
    assert {run(scenario(turns)) for turns in range(12)} == {200}


@pytest.mark.parametrize("seed", range(3))
def test_the_limits_hold_whatever_gets_lost(seed: int) -> None:
    """Coordinators die and answers get lost while three gateways have callers who go away."""
    draw = random.Random(seed)
    limits = LimitsConfig(max_in_flight=6, max_in_flight_per_key=4)

    async def scenario() -> None:
        shared = Behind(Coordinator(limits, 3))
        admissions = [Admission(str(n), shared) for n in range(3)]
        turn, held, most = 0, {"0": 0, "1": 0}, {"0": 0, "1": 0}

        async def request(admission: Admission, caller: str, turns: int) -> None:
            async with admission.place(caller):
                held[caller] += 1
                most[caller] = max(most[caller], held[caller])
                try:
                    assert held[caller] <= 4 and sum(held.values()) <= 6
                    end = min(turn + turns, 400)
                    while turn < end:
                        await asyncio.sleep(0.001)
                finally:
                    held[caller] -= 1

        sent = []
        for turn in range(400):  # the requests read it
            asks = request(draw.choice(admissions), draw.choice("01"), draw.choice((0, 5, 50)))
            sent.append(asyncio.create_task(asks))
            shared.loses_answers = draw.random() < 0.02
            if draw.random() < 0.1:
                draw.choice(sent).cancel()
            if turn % 150 == 149:
                shared.coordinator = Coordinator(limits, 3)
                await settled(*admissions)
            await asyncio.sleep(0.002)
        turn, shared.loses_answers = 400, False
        ended = await asyncio.gather(*sent, return_exceptions=True)
        assert not [each for each in ended if isinstance(each, AssertionError)]
        assert 0 < sum(isinstance(each, ApiError) for each in ended) < len(sent)
        assert most == {"0": 4, "1": 4}
        # All places come back.
        async with AsyncExitStack() as stack:
            for caller in "000111":
                while await tried(admissions[0], caller) == 429:
                    await asyncio.sleep(0.01)
                await stack.enter_async_context(admissions[0].place(caller))
            assert await tried(admissions[1]) == 429

    run(scenario())


def test_all_gateways_have_the_same_salts_and_no_message_shows_their_secret() -> None:
    async def echo(body: dict[str, Any], caller: Caller) -> Response:
        return JSONResponse({"salt": caller.salt})

    shared = Coordinator(FIVE_AND_THREE, 1)
    apps = [gateway(echo, coordinator=shared) for _ in range(2)]
    salts = [[ask(app, json={}, key=key).json()["salt"] for key in (KEY, OTHER)] for app in apps]
    assert salts[0] == salts[1]
    assert salts[0][0] != salts[0][1]

    secret = b"0123456789abcdef"
    report = Report("one", {}, (), secret)
    answer = asyncio.run(Coordinator(ONE).exchange(report))
    assert answer.secret == secret
    assert "0123" not in f"{report} {answer} {report!r} {answer!r}"


def test_the_salts_outlive_the_coordinator() -> None:
    async def scenario() -> None:
        shared = Behind(Coordinator(ONE, 2))
        one, two = Admission("one", shared), Admission("two", shared)
        assert one.secret != two.secret
        await settled(one, two)
        secret = one.secret
        shared.coordinator = Coordinator(ONE, 2)
        await settled(two, one)
        assert one.secret == two.secret == secret

    run(scenario())


def test_any_gateways_page_has_the_metrics_of_all_that_live() -> None:
    clock = Clock()
    shared = Coordinator(FIVE_AND_THREE, 1, clock)
    one, two = (gateway(coordinator=shared) for _ in range(2))
    for app, times in ((one, 2), (two, 3)):
        for _ in range(times):
            assert ask(app, json={}).status_code == 200
        ask(app, "/metrics")
    page = ask(one, "/metrics").text
    found = samples(page, "dpray_requests_total", route=CHAT, status="200")
    assert sorted(sample.value for sample in found) == [2, 3]
    assert len({sample.labels["gateway"] for sample in found}) == 2
    assert requests(ask(two, "/metrics").text, CHAT, 200) == 5
    assert page.count("# TYPE dpray_requests_total counter") == 1
    assert in_flight(page) == 0

    clock.now += LEASE_SECONDS
    assert requests(ask(one, "/metrics").text, CHAT, 200) == 2


def test_a_gateway_that_serves_renews_its_leases() -> None:
    async def scenario() -> list[str]:
        """Under an ASGI server."""
        seen: list[str] = []

        class Noting(Coordinator):
            async def exchange(self, report: Report) -> Answer:
                seen.append("exchange")
                return await super().exchange(report)

            async def publish(self, gateway: str, families: Families) -> Mapping[str, Families]:
                seen.append("publish")
                raise ActorDiedError()

        app = gateway(coordinator=Noting(ONE))
        messages: asyncio.Queue[Any] = asyncio.Queue()
        sent: asyncio.Queue[Any] = asyncio.Queue()
        await messages.put({"type": "lifespan.startup"})
        served = asyncio.create_task(app({"type": "lifespan"}, messages.get, sent.put))
        assert (await sent.get())["type"] == "lifespan.startup.complete"
        while seen.count("exchange") < 2:
            await asyncio.sleep(0.05)
        await messages.put({"type": "lifespan.shutdown"})
        await served
        return seen

    assert {"exchange", "publish"} == set(run(scenario()))
