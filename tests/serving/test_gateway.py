"""What stands before the served models, without Ray: authentication, limits, errors, metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from typing import Any

import openai
import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import BackPressureError
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatusOverview,
    ServeStatus,
)
from starlette.responses import JSONResponse, Response, StreamingResponse

from dpray.serving import applications
from dpray.serving.gateway import Caller
from tests.serving.front import (
    CARDS,
    CHAT,
    KEY,
    MODEL,
    OTHER,
    WORD,
    ask,
    assert_openais,
    counted,
    gateway,
    hashed,
    http,
    in_flight,
    samples,
)


@pytest.mark.parametrize("key", [KEY, OTHER])
def test_every_key_is_let_in(key: str) -> None:
    assert ask(gateway(), json={}, key=key).status_code == 200


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
@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/metrics", "/nothing"])
def test_nobody_else_is(header: str | None, path: str) -> None:
    headers = {"Authorization": header.encode("latin-1")} if header is not None else {}
    answer = ask(gateway(), path, key=None, json={}, headers=headers)

    assert_openais(answer, 401, "invalid_api_key")
    assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_health_needs_no_key_and_says_what_is_missing() -> None:
    async def half() -> Mapping[str, bool]:
        return {"gateway": True, "embedder": False}

    assert ask(gateway(), "/health", key=None).json()["status"] == "ok"
    answer = ask(gateway(ready=half), "/health", key=None)
    assert (answer.status_code, answer.json()["deployments"]["embedder"]) == (503, "not ready")

    async def unknown() -> Mapping[str, bool]:
        return {}

    answer = ask(gateway(ready=unknown), "/health", key=None)
    assert (answer.status_code, answer.json()["status"]) == (503, "not ready")


def serves(**replicas: int) -> ServeStatus:
    """Serve's answer about deployments with so many running replicas."""
    deployments: Any = {
        name: DeploymentStatusOverview("HEALTHY", "UNSPECIFIED", {"RUNNING": number}, "")
        for name, number in replicas.items()
    }
    application = ApplicationStatusOverview(ApplicationStatus.RUNNING, "", 0.0, deployments)
    return ServeStatus(applications={"dpray": application})


def test_probes_ask_one_at_a_time_and_know_nothing_before_an_answer() -> None:
    asked: list[bool] = []

    def status() -> ServeStatus:
        """Slow, and fails the first time."""
        asked.append(True)
        time.sleep(0.1)
        if len(asked) == 1:
            raise ActorDiedError()
        return serves(gateway=1, embedder=0)

    async def probes() -> list[int]:
        async with http(gateway(ready=applications.Readiness(status)), key=None) as client:
            first = await client.get("/health")
            rest = await asyncio.gather(*(client.get("/health") for _ in range(3)))
            assert all(answer.json()["deployments"]["embedder"] == "not ready" for answer in rest)
            return [answer.status_code for answer in (first, *rest)]

    assert asyncio.run(probes()) == [503] * 4
    assert len(asked) == 2


def test_without_keys_only_this_machine_is_served() -> None:
    app = gateway(keys=[], auth="none")

    assert ask(app, json={}, key=None).status_code == 200
    assert ask(app, "/v1/models", key="any").status_code == 200
    for far in ("10.0.0.7", "testclient"):
        assert_openais(ask(app, json={}, key=None, client=(far, 1)), 403, "not_local")


def test_models() -> None:
    app = gateway()
    assert ask(app, "/v1/models").json() == {"object": "list", "data": CARDS}
    assert ask(app, f"/v1/models/{MODEL}").json() == CARDS[0]
    assert_openais(ask(app, f"/v1/models/{WORD}"), 404, "model_not_found")


def test_paths_methods_types_and_bodies_that_are_wrong() -> None:
    app = gateway()
    as_json = {"Content-Type": "application/json"}
    assert_openais(ask(app, f"/v1/{WORD}"), 404, "not_found")
    assert_openais(ask(app, CHAT), 405, "not_found")
    assert_openais(ask(app, content=b"{}"), 415, "unsupported_media_type")
    for body in (f"[{WORD}", f'["{WORD}"]', f'"{WORD}"', "[" * 4_000, "\xff", ""):
        answer = ask(app, content=body.encode("latin-1"), headers=as_json)
        assert_openais(answer, 400, "invalid_json")


def test_a_body_may_have_so_many_bytes_and_no_more() -> None:
    app = gateway(limits={"max_request_bytes": 20})
    as_json = {"Content-Type": "application/json"}

    async def in_pieces(count: int) -> Any:
        for piece in [b"{", *[b" " * 6] * count, b"}"]:
            yield piece

    assert ask(app, content=b"{" + b" " * 18 + b"}", headers=as_json).status_code == 200
    assert_openais(
        ask(app, content=b"{" + b" " * 19 + b"}", headers=as_json), 413, "request_too_large"
    )
    # Without Content-Length: it is counted as it comes.
    assert ask(app, content=in_pieces(3), headers=as_json).status_code == 200
    assert_openais(ask(app, content=in_pieces(4), headers=as_json), 413, "request_too_large")


def test_lone_surrogates_become_text_wherever_they_stand_and_pairs_stay() -> None:
    seen: list[dict[str, Any]] = []

    async def note(body: dict[str, Any], caller: Caller) -> Response:
        seen.append(body)
        return JSONResponse({})

    sent = {
        "messages": [{"role": "user", "content": "a\ud800b"}],
        "stop": ["\udfff", "\N{GRINNING FACE}", '\0"\\'],
        "\ud83d": [0.1, 10**30, None, True],
    }
    answer = ask(
        gateway(note),
        content=json.dumps(sent).encode(),
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 200
    assert seen == [
        {
            "messages": [{"role": "user", "content": "a?b"}],
            "stop": ["?", "\N{GRINNING FACE}", '\0"\\'],
            "?": [0.1, 10**30, None, True],
        }
    ]


def test_so_many_at_once_of_a_key_and_of_all_and_places_come_back() -> None:
    async def scenario() -> list[int]:
        go, begun = asyncio.Event(), asyncio.Semaphore(0)

        async def wait(body: dict[str, Any], caller: Caller) -> Response:
            begun.release()
            await go.wait()
            if body:
                raise ValueError(WORD)
            return JSONResponse({})

        app = gateway(wait, limits={"max_in_flight": 3, "max_in_flight_per_key": 2})
        async with http(app) as one, http(app, OTHER) as two:
            held = [asyncio.create_task(one.post(CHAT, json={})) for _ in range(2)]
            for _ in held:
                await begun.acquire()
            of_a_key = await one.post(CHAT, json={})
            held.append(asyncio.create_task(two.post(CHAT, json={"fails": 1})))
            await begun.acquire()
            of_all = await two.post(CHAT, json={})
            for answer in (of_a_key, of_all):
                assert_openais(answer, 429, "rate_limit_exceeded")
                assert answer.headers["Retry-After"] == "1"
            # Reading takes no place.
            assert in_flight((await one.get("/metrics")).text) == 3
            # Nor does a caller who goes away keep one.
            held[0].cancel()
            await asyncio.wait(held[:1])
            held[0] = asyncio.create_task(one.post(CHAT, json={}))
            await begun.acquire()
            go.set()
            codes = [(await each).status_code for each in held]
            assert in_flight((await one.get("/metrics")).text) == 0
            return [*codes, (await one.post(CHAT, json={})).status_code]

    codes = asyncio.run(asyncio.wait_for(scenario(), 20))
    assert codes == [200, 200, 500, 200]


def test_a_request_may_take_so_long() -> None:
    async def never(body: dict[str, Any], caller: Caller) -> Response:
        await asyncio.sleep(60)
        raise AssertionError

    app = gateway(never, limits={"request_timeout_seconds": 0.05})
    assert_openais(ask(app, json={}), 504, "timeout")


class EngineDeadError(Exception):
    """Called as vLLM's."""


class Refused(Exception):
    """Shaped as the errors of Ray's LLM ingress."""

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
        (Refused(500, WORD), 500, "internal_error"),
    ],
)
def test_errors_of_the_models_are_told_without_their_text(
    error: Exception, status: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    if isinstance(error, RayTaskError):
        error = error.as_instanceof_cause()

    async def fail(body: dict[str, Any], caller: Caller) -> Response:
        raise error

    app = gateway(fail)
    with caplog.at_level(logging.DEBUG):
        answer = ask(app, json={"messages": WORD})
    assert_openais(answer, status, code)
    assert (answer.headers.get("Retry-After") == "1") == (status == 503)
    assert WORD not in caplog.text
    assert counted(app, CHAT, status) == 1


def test_a_stream_goes_through_piece_by_piece_and_ends_with_the_error_that_broke_it() -> None:
    async def breaks(body: dict[str, Any], caller: Caller) -> Response:
        async def events() -> Any:
            for number in range(3):
                yield f'data: {{"id": "{number}", "choices": []}}\n\n'
            raise ActorDiedError()

        return StreamingResponse(events(), media_type="text/event-stream")

    app = gateway(breaks)
    answer = ask(app, json={})
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert [json.loads(event).get("id") for event in events] == ["0", "1", "2", None]
    assert json.loads(events[-1])["error"]["code"] == "replica_lost"
    assert counted(app, CHAT, 503) == 1

    async def client_sees() -> None:
        client = openai.AsyncOpenAI(base_url="http://test/v1", api_key=KEY, http_client=http(app))
        stream = await client.chat.completions.create(model=MODEL, messages=[], stream=True)
        assert [(await anext(stream)).id for _ in range(3)] == ["0", "1", "2"]
        with pytest.raises(openai.APIError, match="replica was lost"):
            await anext(stream)

    asyncio.run(client_sees())


def test_keys_have_salts_of_their_own_that_no_caller_chooses() -> None:
    app = gateway()
    salts = [ask(app, json={"cache_salt": "x"}, key=key).json()["salt"] for key in (KEY, OTHER)]

    assert len(set(salts)) == 2
    assert ask(app, json={}).json()["salt"] == salts[0]
    assert ask(gateway(), json={}).json()["salt"] != salts[0]


def test_metrics_know_routes_and_statuses_only() -> None:
    app = gateway()
    ask(app, json={"messages": WORD})
    ask(app, f"/v1/{WORD}")
    ask(app, f"/v1/models/{WORD}")
    ask(app, json={}, key=WORD)

    assert counted(app, CHAT, 200) == counted(app, CHAT, 401) == 1
    assert counted(app, "other", 404) == counted(app, "/v1/models/{model}", 404) == 1
    page = ask(app, "/metrics")
    assert page.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    [count] = samples(page.text, "dpray_request_seconds_count", route=CHAT)
    assert count.value == 2
    assert WORD not in page.text
