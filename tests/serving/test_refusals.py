"""The guard under clients that are slow or do not wait, without Ray: they keep no place."""

from __future__ import annotations

import asyncio
from typing import Any

from dpray.serving.errors import ApiError
from dpray.serving.guard import Caller
from tests.serving.front import CHAT, GOOD, ask, assert_openais, guard

JSON = {"Content-Type": "application/json"}


def test_a_body_that_does_not_end_is_refused_and_keeps_no_place() -> None:
    app = guard(limits={"body_timeout_seconds": 0.05, "max_in_flight_per_key": 1})

    async def byte_by_byte() -> Any:
        while True:
            yield b" "
            await asyncio.sleep(0.01)

    for _ in range(2):
        answer = ask(app, content=byte_by_byte(), headers=JSON)
        assert_openais(answer, 408, "request_too_slow")
    assert ask(app, json=GOOD[CHAT]).status_code == 200


def test_a_key_with_too_many_requests_waits_for_the_refusal_of_as_many_as_it_may_have() -> None:
    async def scenario() -> None:
        caller = Caller("0", 2, retry_seconds=600)

        async def one() -> None:
            async with caller.counted():
                pass

        async with caller.counted(), caller.counted():
            refused = [asyncio.create_task(one()) for _ in range(5)]
            await asyncio.sleep(0.01)
            assert [each.done() for each in refused] == [False, False, True, True, True]
            # A client that goes away waits no more.
            refused[0].cancel()
            await asyncio.wait(refused[:1])
            refused[0] = asyncio.create_task(one())
            await asyncio.sleep(0.01)
            assert not refused[0].done()
            for each in refused[:2]:
                each.cancel()
            ended = await asyncio.gather(*refused, return_exceptions=True)
            assert [type(each) for each in ended[2:]] == [ApiError] * 3
        await one()

    asyncio.run(asyncio.wait_for(scenario(), 60))
