"""Generation over HTTP, against a small server that speaks the API and can misbehave."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from dpray.config.sections import EngineConfig
from dpray.engines.base import Completion, EngineError, Prompt, Sampling
from dpray.engines.openai import OpenAIEngine
from tests.engines.api_server import SLOW, Server, chat, running_server


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


def test_a_system_message_comes_first_and_a_prefix_begins_the_answer(server: Server) -> None:
    asked = Prompt("hello", "Text:", "Be brief.")
    engine(server).generate([asked], [Sampling(7)])
    body = server.requests[-1][1]
    parts = ("system", "Be brief."), ("user", "hello"), ("assistant", "Text:")
    assert body["messages"] == [{"role": role, "content": said} for role, said in parts]
    assert body["continue_final_message"] is True and body["add_generation_prompt"] is False
    [done] = engine(server, api="completions").generate([asked], [Sampling(7)])
    assert done.text == " hello brief. Be"  # it was answered with the prefix, too
    path, body = server.requests[-1]
    assert path == "/v1/completions" and body["prompt"] == "Be brief.\n\nhello\n\nText:"


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


def error(**fields: Any) -> str:
    return json.dumps(
        {"error": {"message": "no", "type": "t", "param": None, "code": None} | fields}
    )


UNKNOWN = {
    "code": error(param="{name}", code="unsupported_parameter"),
    "value": error(param="{name}", code="unsupported_value"),
    "words": error(message="Unsupported parameter: '{name}' is not supported with this model."),
    "FastAPI": json.dumps(
        {"detail": [{"type": "extra_forbidden", "loc": ["body", "{name}"], "msg": "not permitted"}]}
    ),
}
PARAMETERS = ["max_tokens", "temperature", "top_p", "stop"]


@pytest.mark.parametrize(
    ("name", "status", "body"),
    [
        *(("top_p", 400, body) for body in UNKNOWN.values()),
        *((name, 422, UNKNOWN["FastAPI"]) for name in PARAMETERS if name != "top_p"),
    ],
)
def test_a_parameter_that_the_model_does_not_know_is_left_out_from_then_on(
    server: Server, name: str, status: int, body: str
) -> None:
    server.refuses = {name: (status, body.replace("{name}", name))}
    api = engine(server, max_in_flight=2)
    prompts = [Prompt(f"x {i} number") for i in range(6)]
    done = api.generate(prompts, [Sampling(7, temperature=0.5, stop=("x",))] * 6)
    assert [c.text for c in done] == [f"number {i} " for i in range(6)]  # cut at x, here or there
    assert api.left_out == {name} and len(server.requests) <= 8
    last = server.requests[-1][1]
    assert name not in last and PARAMETERS[1 if name == "max_tokens" else 0] in last
    assert ("max_completion_tokens" in last) == (name == "max_tokens")
    if name == "max_tokens":
        assert last["max_completion_tokens"] == 7


def test_a_strict_server_is_asked_without_the_extra_fields_of_a_prefix(server: Server) -> None:
    said = error(message="Unrecognized request arguments supplied: {name}")
    server.refuses = {
        name: (400, said.replace("{name}", name))
        for name in ("continue_final_message", "add_generation_prompt")
    }
    engine(server).generate([Prompt("hello", "Text:")], [Sampling(7)])
    assert "continue_final_message" not in server.requests[-1][1]
    assert server.requests[-1][1]["messages"][1]["content"] == "Text:"


@pytest.mark.parametrize(
    ("status", "fields", "said"),
    [
        (400, {"param": "max_tokens", "code": "invalid_value"}, r"code invalid_value, param max_t"),
        (
            400,
            {"param": "top_k", "code": "unknown_parameter"},
            r"code unknown_parameter, param top_k",
        ),
        (400, {"param": "temperature", "code": "above_maximum"}, r"code above_maximum, param temp"),
        (
            400,
            {"message": "your temperature 38 is unknown", "type": "BadRequest"},
            r"code BadRequest",
        ),
        (401, {"code": "invalid_api_key"}, r"401 \(code invalid_api_key\): engine\.api_key"),
        (403, {}, r"403 \(code t\): engine\.api_key may not"),
        (404, {"code": "model_not_found"}, r"404 \(code model_not_found\): no such engine\.model"),
        (429, {"code": "insufficient_quota"}, r"429 \(code insufficient_quota\)$"),
        (400, {"code": "secret words", "param": {"a": "secret"}}, r"400 \(code t\)$"),
        (400, {"code": 7, "type": None}, r"400 \(code 7\)$"),
    ],
)
def test_an_error_names_the_endpoints_code_and_parameter_and_quotes_nothing(
    server: Server, status: int, fields: dict[str, Any], said: str
) -> None:
    server.refuses = {"temperature": (status, error(**fields))}
    with pytest.raises(EngineError, match=rf"HTTP status ({status} \()?{said}") as caught:
        engine(server, attempts=1).generate([Prompt("secret words")], [Sampling(7, top_k=3)])
    assert "secret" not in str(caught.value) and len(server.requests) == 1


@pytest.mark.parametrize("code", ["content_filter", "content_policy_violation"])
def test_a_prompt_that_a_filter_refuses_has_an_empty_answer(server: Server, code: str) -> None:
    server.refuses = {"temperature": (400, error(code=code))}
    [done] = engine(server).generate([Prompt("a b")], [Sampling(7)])
    assert (done.text, done.finish_reason) == ("", "content_filter")


PARTS: dict[str, tuple[Any, str | None]] = {
    "texts": ([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}], "a b"),
    "thoughts": (
        [
            {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
            {"type": "text", "text": "a"},
        ],
        "a",
    ),
    "none": ([], ""),
    "words": (["a"], None),
    "pictures": ([{"type": "image_url", "image_url": "x"}], None),
}


@pytest.mark.parametrize(("content", "text"), PARTS.values(), ids=PARTS)
def test_content_may_be_a_list_of_parts(server: Server, content: Any, text: str | None) -> None:
    server.faults = [
        chat(message={"role": "assistant", "content": content}, finish_reason="x" * 99)
    ]
    if text is None:
        with pytest.raises(EngineError, match="has no text"):
            engine(server).generate([Prompt("a b")], [Sampling(7)])
        return
    [done] = engine(server).generate([Prompt("a b")], [Sampling(7)])
    assert (done.text, done.finish_reason) == (text, "")


def test_nobody_there() -> None:
    config = EngineConfig(model="m", base_url="http://127.0.0.1:9/v1", api_key="key", attempts=2)
    nobody = OpenAIEngine(config)
    with pytest.raises(
        EngineError, match=r"\(APIConnectionError\): nothing answers at engine\.base_url"
    ):
        nobody.generate([Prompt("a")], [Sampling(1)])
