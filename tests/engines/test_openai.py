"""Generation over HTTP, against a small server that speaks the API and can misbehave."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dpray.config.sections import EngineConfig
from dpray.engines.base import Completion, EngineError, Prompt, Sampling
from dpray.engines.openai import OpenAIEngine
from tests.engines.api_server import MALFORMED, SLOW, Server, chat, running_server


@pytest.fixture
def server() -> Iterator[Server]:
    with running_server() as server:
        yield server


def engine(server: Server, **options: Any) -> OpenAIEngine:
    config = EngineConfig(kind="openai", model="m", base_url=server.url, api_key="key", **options)
    return OpenAIEngine(config)


def test_chat_keeps_the_order_and_bounds_what_is_in_flight(server: Server) -> None:
    finished: dict[int, Completion] = {}
    prompts = [Prompt(f"number {i}") for i in range(12)]
    sampling = Sampling(7, temperature=0.5, top_k=9, top_p=0.8, stop=("x",))
    done = engine(server, max_in_flight=3).generate(
        prompts, [sampling] * len(prompts), finished.__setitem__
    )
    assert [c.text for c in done] == [f"{i} number" for i in range(12)]
    assert [finished[i] for i in range(12)] == done
    assert 1 < server.most_in_flight <= 3
    path, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": body["messages"][0]["content"]}]
    sent = {key: body[key] for key in ("max_tokens", "temperature", "top_k", "top_p", "stop")}
    assert sent == {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_k": 9,
        "top_p": 0.8,
        "stop": ["x"],
    }
    with pytest.raises(ValueError, match="shorter"):
        engine(server).generate(prompts, [sampling])
    assert engine(server).generate([], []) == []
    assert (done[0].prompt_tokens, done[0].completion_tokens) == (3, 2)


def test_a_prefix_begins_the_answer_of_either_api(server: Server) -> None:
    engine(server).generate([Prompt("hello", "Text:")], [Sampling(7)])
    body = server.requests.pop()[1]
    assert body["messages"][1] == {"role": "assistant", "content": "Text:"}
    assert body["continue_final_message"] is True and body["add_generation_prompt"] is False
    done = engine(server, api="completions").generate([Prompt("hello", "Text:")], [Sampling(7)])
    assert done[0].text == "Text: hello"
    path, body = server.requests[0]
    assert path == "/v1/completions" and body["prompt"] == "hello\n\nText:"


@pytest.mark.parametrize("faults", [[429], [500], [0]], ids=str)
def test_passing_faults_are_tried_again(server: Server, faults: list[int]) -> None:
    server.faults = list(faults)
    done = engine(server).generate([Prompt("a b")], [Sampling(7)])
    assert done[0].text == "b a"
    assert len(server.requests) == 2


def test_a_late_answer_is_asked_for_again(server: Server) -> None:
    server.faults = [SLOW]
    done = engine(server, timeout=0.8).generate([Prompt("a b")], [Sampling(7)])
    assert done[0].text == "b a" and len(server.requests) >= 2
    server.faults = [SLOW] * 9
    with pytest.raises(EngineError, match="APITimeoutError"):
        engine(server, timeout=0.2, attempts=1).generate([Prompt("a")], [Sampling(7)])


@pytest.mark.parametrize("body", MALFORMED.values(), ids=list(MALFORMED))
def test_a_malformed_answer_is_an_error_without_the_prompt(server: Server, body: str) -> None:
    server.faults = [body]
    with pytest.raises(EngineError, match=r"^m: the endpoint's answer has no ") as caught:
        engine(server).generate([Prompt("secret words")], [Sampling(7)])
    assert len(server.requests) == 1
    assert "secret" not in str(caught.value) and caught.value.__cause__ is None


@pytest.mark.parametrize(
    "body",
    [
        chat(message={"role": "assistant", "content": None}),
        chat(message={"role": "assistant", "content": None, "refusal": "I cannot"}),
        chat(message={"role": "assistant", "content": ""}),
        chat(message={"role": "assistant", "content": "half"}, finish_reason="content_filter"),
    ],
    ids=["null", "refusal", "empty", "filtered"],
)
def test_answers_without_content_are_empty_texts(server: Server, body: str) -> None:
    server.faults = [body]
    done = engine(server).generate([Prompt("a b")], [Sampling(7)])
    assert done == [Completion("", 0, 0)] and len(server.requests) == 1


def test_after_an_error_what_is_in_flight_is_kept_and_nothing_new_begins(server: Server) -> None:
    server.faults = [400]
    finished: dict[int, Completion] = {}
    prompts = [Prompt(f"number {i}") for i in range(40)]
    with pytest.raises(EngineError, match="HTTP status 400"):
        engine(server, max_in_flight=4).generate(
            prompts, [Sampling(7)] * len(prompts), finished.__setitem__
        )
    assert len(finished) == len(server.requests) - 1
    assert len(server.requests) < 40


def test_an_error_of_the_callback_ends_the_call(server: Server) -> None:
    def full(index: int, completion: Completion) -> None:
        raise OSError("disk full")

    prompts = [Prompt(f"number {i}") for i in range(40)]
    with pytest.raises(OSError, match="disk full"):
        engine(server, max_in_flight=4).generate(prompts, [Sampling(7)] * len(prompts), full)
    assert len(server.requests) <= 4


@pytest.mark.parametrize(("status", "requests"), [(500, 2), (400, 1), (401, 1), (404, 1)])
def test_a_lasting_fault_and_a_bad_request_end_with_an_error_without_the_prompt(
    server: Server, status: int, requests: int
) -> None:
    server.faults = [status] * 99
    with pytest.raises(EngineError, match=f"HTTP status {status}") as caught:
        engine(server, attempts=2).generate([Prompt("secret words")], [Sampling(7)])
    assert len(server.requests) == requests
    assert "secret" not in str(caught.value) and caught.value.__cause__ is None


def test_nobody_there() -> None:
    config = EngineConfig(model="m", base_url="http://127.0.0.1:9/v1", api_key="key", attempts=2)
    nobody = OpenAIEngine(config)
    with pytest.raises(EngineError, match="APIConnectionError"):
        nobody.generate([Prompt("a")], [Sampling(1)])
