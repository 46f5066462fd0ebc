"""Keys that share a model: none is kept waiting by another one's many requests."""

from __future__ import annotations

import asyncio
import random

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dpray.serving.guard import Callers, Share
from dpray.serving.requests import Room
from tests.serving.front import COMPLETIONS, GOOD, KEY, OTHER, ROOM, config, guard, hashed, http


@pytest.mark.parametrize("replicas", [1, 2, 5])
@pytest.mark.parametrize("gateways", [1, 2, 3])
def test_the_shares_of_two_callers_in_all_gateways_fill_the_model(
    gateways: int, replicas: int
) -> None:
    room = Room(size=6000, part=10, smallest=100)
    share = Callers(config(gateways=gateways)).share(room, replicas)
    assert 2 * gateways * share == 6000 * replicas
    alone = Callers(config(gateways=gateways, keys=[hashed(KEY)])).share(room, replicas)
    assert gateways * alone == 6000 * replicas


def test_a_share_has_room_for_a_request_of_the_whole_context() -> None:
    small = Room(size=100, part=100, smallest=100)
    assert Callers(config(gateways=3)).share(small) == 100


def test_a_callers_requests_get_their_share_in_their_order() -> None:
    order: list[int] = []

    async def scenario() -> None:
        share, go = Share(), [asyncio.Event() for _ in range(4)]

        async def request(number: int, cost: int) -> None:
            async with share.take(cost, limit=10):
                order.append(number)
                await go[number].wait()

        sent = [asyncio.create_task(request(n, cost)) for n, cost in enumerate((6, 10, 4, 6))]
        await asyncio.sleep(0.01)
        # The last would fit beside the first, but the second one's turn is before it.
        assert order == [0]
        for number, running in ((0, [0, 1]), (1, [0, 1, 2, 3])):
            go[number].set()
            await asyncio.sleep(0.01)
            assert order == running
        go[2].set()
        go[3].set()
        await asyncio.gather(*sent)

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize("seed", range(5))
def test_no_share_is_exceeded_or_lost_when_callers_go_away(seed: int) -> None:
    draw = random.Random(seed)

    async def scenario() -> None:
        share, held, served = Share(), 0, 0

        async def request(cost: int) -> None:
            nonlocal held, served
            async with share.take(cost, limit=16):
                held += cost
                assert held <= 16
                try:
                    for _ in range(draw.randrange(20)):
                        await asyncio.sleep(0)
                finally:
                    held -= cost
                served += 1

        sent = [asyncio.create_task(request(draw.choice((1, 4, 16)))) for _ in range(300)]
        for each in draw.sample(sent, 60):
            await asyncio.sleep(0)
            each.cancel()
        ended = await asyncio.gather(*sent, return_exceptions=True)
        assert not [each for each in ended if isinstance(each, AssertionError)]
        assert served >= 240
        await asyncio.wait_for(request(16), 1)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_flood_takes_half_of_a_model_and_the_next_caller_finds_room_at_once() -> None:
    slots, go = asyncio.Semaphore(ROOM.size // ROOM.part), asyncio.Event()
    running = 0

    async def answer(request: Request) -> Response:
        """As vLLM: so many sequences at a time, the first that came first."""
        nonlocal running
        is_flood = (await request.json())["user"] == "flood"
        async with slots:
            running += is_flood
            if is_flood:
                await go.wait()
        return JSONResponse({})

    async def scenario() -> None:
        app = guard(answer)
        async with http(app, OTHER) as bad, http(app, KEY) as good:
            flood = GOOD[COMPLETIONS] | {"user": "flood"}
            sent = [asyncio.create_task(bad.post(COMPLETIONS, json=flood)) for _ in range(100)]
            while running < 10:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert running == 10
            # No request of the flood ends before this one does.
            answered = await good.post(COMPLETIONS, json=GOOD[COMPLETIONS] | {"user": "good"})
            assert answered.status_code == 200
            go.set()
            assert {(await each).status_code for each in sent} == {200}

    asyncio.run(asyncio.wait_for(scenario(), 60))
