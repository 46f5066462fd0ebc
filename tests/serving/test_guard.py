"""The guard before Ray's OpenAI application, without Ray: keys, bounds, limits, shares, errors."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from typing import Any

import openai
import pytest
from fastapi.exceptions import RequestValidationError
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import BackPressureError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from dpray.serving.guard import Callers, Share
from dpray.serving.requests import Room
from tests.serving.front import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    GOOD,
    KEY,
    MODEL,
    OTHER,
    ROOM,
    WORD,
    ask,
    assert_openais,
    config,
    guard,
    hashed,
    http,
)

JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        f"Basic {KEY}",
        KEY,
        f"Bearer {hashed(KEY)}",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        "Bearer \xe9",
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/nothing"])
def test_nobody_else_is(header: str | None, path: str) -> None:
    headers = {"Authorization": header.encode("latin-1")} if header is not None else {}
    # Its body is not even JSON: the key is checked before it is read.
    answer = ask(guard(), path, key=None, content=b"{", headers=headers)

    assert_openais(answer, 401, "invalid_api_key")
    assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_what_passes_has_no_header_of_the_caller_and_a_salt_of_its_own() -> None:
    app = guard()
    sent = {"json": GOOD[CHAT], "headers": {"X-Secret": WORD}}
    mine, others = ask(app, **sent).json(), ask(app, **sent, key=OTHER).json()

    assert mine["headers"] == ["content-type"]
    assert mine["body"].pop("cache_salt") != others["body"].pop("cache_salt")
    assert mine["body"] == others["body"] == GOOD[CHAT]
    sent = {"path": EMBEDDINGS, "json": GOOD[EMBEDDINGS]}
    mine, others = (ask(app, **sent, key=key).json()["body"] for key in (KEY, OTHER))
    assert mine.pop("cache_salt") != others.pop("cache_salt")
    assert mine == others == {"model": MODEL, "input": [WORD], "truncate_prompt_tokens": -1}


def test_paths_methods_types_and_bodies_that_are_wrong() -> None:
    app = guard()
    assert_openais(ask(app, f"/v1/{WORD}"), 404, "not_found")
    assert_openais(ask(app, f"/v1/{WORD}", json={}), 404, "not_found")
    assert_openais(ask(app, CHAT), 405, "not_found")
    assert_openais(ask(app, content=b"{}"), 415, "unsupported_media_type")
    for body in (f"[{WORD}", f'["{WORD}"]', f'"{WORD}"', "[" * 4_000, "\xff", ""):
        answer = ask(app, content=body.encode("latin-1"), headers=JSON)
        assert_openais(answer, 400, "invalid_json")
    for path, body in GOOD.items():
        answer = ask(app, path, json=body | {"model": WORD})
        assert_openais(answer, 404, "model_not_found")


def test_no_post_reaches_the_application_unchecked() -> None:
    """Serve may route a prefix to the application, which takes it off the path itself."""
    app = guard()

    async def below_a_prefix(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {"root_path": "/llm", "path": "/llm" + scope["path"]}, receive, send)

    unchecked = GOOD[CHAT] | {"chat_template": WORD}
    assert_openais(ask(below_a_prefix, json=unchecked), 404, "not_found")
    for host in ("h/v1/models?", "h/v1/models#", "h\\", ""):
        answer = ask(app, json=unchecked, headers={"Host": host})
        assert_openais(answer, 400, "invalid_value")


def test_a_body_may_have_as_many_bytes_as_the_limit_and_no_more() -> None:
    body = json.dumps(GOOD[COMPLETIONS]).encode()
    app = guard(limits={"max_request_bytes": len(body) + 20})

    async def in_pieces(count: int) -> Any:
        for piece in [b" " * 5] * count + [body]:
            yield piece

    assert ask(app, COMPLETIONS, content=body + b" " * 20, headers=JSON).status_code == 200
    too_long = ask(app, COMPLETIONS, content=body + b" " * 21, headers=JSON)
    assert_openais(too_long, 413, "request_too_large")
    # Without Content-Length: it is counted as it comes.
    assert ask(app, COMPLETIONS, content=in_pieces(4), headers=JSON).status_code == 200
    too_long = ask(app, COMPLETIONS, content=in_pieces(5), headers=JSON)
    assert_openais(too_long, 413, "request_too_large")


def test_a_request_of_more_than_a_share_is_refused_with_the_limit() -> None:
    """A key's share is 500 tokens, and a sequence takes 50 of them at least."""
    app = guard()
    many = {"prompt": ["a"] * 10, "n": 1, "max_tokens": 9}
    long = {"prompt": ["a" * 90] * 6, "max_tokens": 9}
    for changes, key, limit in (
        (many | {"n": 2}, "n", "at most 10 "),
        (long, "max_tokens", "at most 500 tokens"),
    ):
        answer = ask(app, COMPLETIONS, json=GOOD[COMPLETIONS] | changes)
        assert_openais(answer, 400, "invalid_value")
        assert answer.json()["error"]["param"] == key
        assert limit in answer.json()["error"]["message"]
    many_texts = ask(app, EMBEDDINGS, json=GOOD[EMBEDDINGS] | {"input": ["a"] * 501})
    assert many_texts.json()["error"]["param"] == "input"
    assert ask(app, COMPLETIONS, json=GOOD[COMPLETIONS] | many).status_code == 200
    # A caller who is the only one may have all.
    alone = guard(keys=[hashed(KEY)])
    assert ask(alone, COMPLETIONS, json=GOOD[COMPLETIONS] | long).status_code == 200


@pytest.mark.parametrize("gateways", [1, 2])
def test_a_key_has_so_many_in_flight_in_all_gateways_and_places_come_back(gateways: int) -> None:
    async def scenario() -> list[int]:
        go, begun = asyncio.Event(), asyncio.Semaphore(0)

        async def wait(request: Request) -> Response:
            begun.release()
            await go.wait()
            if (await request.json()).get("seed"):
                raise ValueError(WORD)
            return JSONResponse({})

        app = guard(wait, gateways=gateways, limits={"max_in_flight_per_key": 2 * gateways})
        async with http(app) as one, http(app, OTHER) as two:
            held = [asyncio.create_task(one.post(CHAT, json=GOOD[CHAT])) for _ in range(2)]
            for _ in held:
                await begun.acquire()
            too_many = await one.post(CHAT, json=GOOD[CHAT])
            assert_openais(too_many, 429, "rate_limit_exceeded")
            assert too_many.headers["Retry-After"] == "1"
            # Reading takes no place, and the other key has its own.
            assert (await one.get("/v1/nothing")).status_code == 404
            held.append(asyncio.create_task(two.post(CHAT, json=GOOD[CHAT] | {"seed": 1})))
            await begun.acquire()
            # Nor does a caller who goes away keep one.
            held[0].cancel()
            await asyncio.wait(held[:1])
            held[0] = asyncio.create_task(one.post(CHAT, json=GOOD[CHAT]))
            await begun.acquire()
            go.set()
            codes = [(await each).status_code for each in held]
            return [*codes, (await one.post(CHAT, json=GOOD[CHAT])).status_code]

    assert asyncio.run(asyncio.wait_for(scenario(), 60)) == [200, 200, 500, 200]


def test_a_key_has_so_many_requests_a_minute_in_all_gateways() -> None:
    app = guard(gateways=2, limits={"requests_per_minute_per_key": 6})
    statuses = [ask(app, json=GOOD[CHAT]).status_code for _ in range(5)]
    # At most one slides out of the window while the test runs.
    assert statuses[:3] == [200] * 3 and 429 in statuses
    assert ask(app, json=GOOD[CHAT], key=OTHER).status_code == 200
    for path, sent in (("/v1/models", {}), (f"/v1/{WORD}", {"json": {}})):
        app = guard(limits={"requests_per_minute_per_key": 3})
        assert 429 in [ask(app, path, **sent).status_code for _ in range(5)], path


def test_a_request_takes_no_longer_than_the_limit() -> None:
    async def never(request: Request) -> Response:
        await asyncio.sleep(60)
        raise AssertionError

    app = guard(never, limits={"request_timeout_seconds": 0.05})
    assert_openais(ask(app, json=GOOD[CHAT]), 504, "timeout")


class EngineDeadError(Exception):
    """Called as vLLM's."""


class VLLMClientError(Exception):
    """Called as vLLM's."""


class Refused(Exception):
    """Shaped as the errors of Ray's OpenAI ingress."""

    def __init__(self, status_code: int, message: str) -> None:
        super().__init__(message)
        self.status_code, self.message = status_code, message


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BackPressureError(num_queued_requests=3, max_queued_requests=3), 503, "overloaded"),
        (ActorDiedError(), 503, "replica_lost"),
        (RayTaskError("embed", WORD, EngineDeadError(WORD)), 503, "replica_lost"),
        (RayTaskError("embed", WORD, ValueError(WORD)), 500, "internal_error"),
        (ValueError(WORD), 500, "internal_error"),
        (Refused(400, f"maximum context length is 8, {WORD}"), 400, "context_length_exceeded"),
        (Refused(400, f"no such role: {WORD}"), 400, "invalid_value"),
        (Refused(404, WORD), 404, "model_not_found"),
        (VLLMClientError(WORD), 400, "invalid_value"),
        (Refused(500, WORD), 500, "internal_error"),
        (RequestValidationError([{"input": WORD, "msg": WORD}]), 400, "invalid_value"),
    ],
)
def test_errors_of_the_models_are_told_without_their_text(
    error: Exception, status: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    if isinstance(error, RayTaskError):
        error = error.as_instanceof_cause()

    async def fail(request: Request) -> Response:
        raise error

    with caplog.at_level(logging.DEBUG):
        answer = ask(guard(fail), json=GOOD[CHAT])
    assert_openais(answer, status, code)
    assert (answer.headers.get("Retry-After") == "1") == (status == 503)
    assert WORD not in caplog.text


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("As of transformers v4.44, default chat template is no longer allowed", "messages"),
        ("Conversation roles must alternate (TemplateError: chat template)", "messages"),
        ("token_id(s) [9] in logit_bias contain out-of-vocab token ids", "logit_bias"),
        ("The decoder prompt cannot be empty", "prompt"),
        ("You must pass at least one prompt", "prompt"),
    ],
)
@pytest.mark.parametrize("kind", ["of Ray", "of vLLM"])
def test_a_400_of_the_models_server_names_the_key(kind: str, said: str, key: str) -> None:
    async def fail(request: Request) -> Response:
        said_to = f"{said}: {WORD}"
        raise Refused(400, said_to) if kind == "of Ray" else VLLMClientError(said_to)

    answer = ask(guard(fail), json=GOOD[CHAT])
    assert_openais(answer, 400, "invalid_value")
    found = answer.json()["error"]
    assert found["param"] == key and found["message"].startswith(f"{key}: ")


def test_a_stream_goes_through_piece_by_piece_and_ends_with_the_error_that_broke_it() -> None:
    async def breaks(request: Request) -> Response:
        async def events() -> Any:
            for number in range(3):
                yield f'data: {{"id": "{number}", "choices": []}}\n\n'
            raise ActorDiedError()

        return StreamingResponse(events(), media_type="text/event-stream")

    app = guard(breaks)
    answer = ask(app, json=GOOD[CHAT])
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert [json.loads(event).get("id") for event in events] == ["0", "1", "2", None]
    assert json.loads(events[-1])["error"]["code"] == "replica_lost"

    async def client_sees() -> None:
        client = openai.AsyncOpenAI(base_url="http://test/v1", api_key=KEY, http_client=http(app))
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "t"}], stream=True
        )
        assert [(await anext(stream)).id for _ in range(3)] == ["0", "1", "2"]
        with pytest.raises(openai.APIError, match="replica was lost"):
            await anext(stream)

    asyncio.run(client_sees())


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
