"""The endpoints' keys and the bounds of their bodies, without Ray and without vLLM."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dpray.config.sections import EngineConfig
from dpray.engines.base import Prompt, Sampling
from dpray.engines.openai import OpenAIEngine
from dpray.serving.errors import ApiError
from dpray.serving.requests import (
    MAX_BIASES,
    MAX_N,
    MAX_SEQUENCES,
    Call,
    ChatCall,
    CompletionCall,
    EmbeddingCall,
    Room,
    checked,
    has_few_entries,
)
from tests.engines.api_server import running_server
from tests.serving.front import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    GOOD,
    KEY,
    MODEL,
    OTHER,
    WORD,
    ask,
    assert_openais,
    guard,
    http,
)

USER = {"role": "user", "content": WORD}
KINDS: dict[str, type[Call]] = {
    CHAT: ChatCall,
    COMPLETIONS: CompletionCall,
    EMBEDDINGS: EmbeddingCall,
}


def call(path: str, body: dict[str, Any]) -> Call:
    return checked(KINDS[path], json.dumps(body).encode(), 4096)


def taken(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The keys that a request has, of those that it may have."""
    return call(path, body).model_dump(exclude_none=True)


VLLMS_OWN = """
    best_of use_beam_search priority prompt_embeds echo suffix prompt_logprobs logprob_token_ids
    allowed_token_ids min_tokens truncate_prompt_tokens structured_outputs response_format
    guided_regex guided_json guided_grammar tools tool_choice functions documents chat_template
    chat_template_kwargs mm_processor_kwargs media_io_kwargs modalities audio cache_salt request_id
    session_id kv_transfer_params ec_transfer_params vllm_xargs return_token_ids
    return_tokens_as_token_ids stream_interval repetition_detection bad_words stop_token_ids made_up
"""
"""vLLM takes these keys, or ignores them. A key is refused by its name, whatever its value is."""


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("key", VLLMS_OWN.split())
def test_a_key_that_is_not_listed_is_refused_by_name(path: str, key: str) -> None:
    answer = ask(guard(), path, json=GOOD[path] | {key: WORD})

    assert_openais(answer, 400, "invalid_value")
    error = answer.json()["error"]
    assert (error["param"], error["message"]) == (key, f"{key}: there is no such key here")


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("key", [WORD, f"say {WORD}", "a" * 41, "", "n\n"])
def test_a_callers_own_words_are_not_repeated(path: str, key: str) -> None:
    answer = ask(guard(), path, json=GOOD[path] | {key: WORD})

    assert_openais(answer, 400, "invalid_value")
    assert answer.json()["error"]["param"] is None


def parts(*given: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(given)}


TEXT = {"type": "text", "text": WORD}
BOTH: dict[str, list[Any]] = {
    "n": [MAX_N + 1, 10**9, 0, "3", True, 1.0],
    "max_tokens": [0, 2**31, 10**400],
    "temperature": [-0.1, 2.1, float("nan"), 10**400, WORD],
    "top_p": [0, 7],
    "top_k": [-2],
    "frequency_penalty": [2.5],
    "presence_penalty": [float("-inf")],
    "logit_bias": [{WORD: 1}, {"-1": 1}, {"7": 101}, [WORD]],
    "seed": [2**63],
    "stop": [[WORD] * 5, WORD * 40, [""], [3]],
    "stream": ["yes"],
    "stream_options": [{"continuous_usage_stats": True}],
    "user": [WORD * 40],
    "ignore_eos": [1],
}
MESSAGES: list[Any] = [
    WORD,
    {"role": "user"},
    {"role": WORD, "content": "x"},
    {"role": "tool", "content": "x", "tool_call_id": "1"},
    USER | {"tool_calls": [{"id": "1"}]},
    USER | {WORD: WORD},
    parts({"type": "image_url", "image_url": {"url": f"http://10.0.0.7/{WORD}"}}),
    parts(TEXT, {"type": "input_audio", "input_audio": {"data": WORD}}),
    parts({"type": "video_url", "video_url": {"url": "file:///etc/passwd"}}),
    parts(TEXT | {"image_url": {"url": "http://10.0.0.7/"}}),
    parts(*[TEXT] * 257),
    parts(WORD),
]
OUT_OF_BOUNDS: dict[str, dict[str, list[Any]]] = {
    CHAT: BOTH
    | {
        "max_completion_tokens": [10**12],
        "top_logprobs": [21, -1],
        "logprobs": [5],
        "reasoning_effort": [WORD],
        "messages": [[], WORD, [USER] * 257, *([message] for message in MESSAGES)],
    },
    COMPLETIONS: BOTH
    | {
        "logprobs": [21, True],
        "prompt": [[], [1, 2], [[1, 2]], {"prompt_token_ids": [1]}, [WORD] * (MAX_SEQUENCES + 1)],
    },
    EMBEDDINGS: {
        "input": [None, [], "", [WORD, 3], [[1, 2]], {"text": WORD}],
        "encoding_format": [WORD],
        "dimensions": [3],
    },
}


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        (path, key, value)
        for path, keys in OUT_OF_BOUNDS.items()
        for key, values in keys.items()
        for value in values
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 30 else "",
)
def test_a_value_out_of_bounds_is_refused_with_its_key(path: str, key: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        call(path, GOOD[path] | {key: value})

    assert (caught.value.status, caught.value.param) == (400, key)
    assert WORD not in caught.value.message and len(caught.value.message) < 200


def test_prompts_times_n_are_bounded() -> None:
    prompts = ["a"] * (MAX_SEQUENCES // MAX_N)
    most = GOOD[COMPLETIONS] | {"prompt": prompts, "n": MAX_N}
    assert taken(COMPLETIONS, most)["prompt"] == prompts
    with pytest.raises(ApiError) as caught:
        call(COMPLETIONS, most | {"prompt": [*prompts, "a"]})
    assert caught.value.param == "n"


FOUR = {"role": "user", "content": "four"}


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        (COMPLETIONS, {"prompt": ["four"], "max_tokens": 20}, 24),
        (COMPLETIONS, {"prompt": ["four"], "max_tokens": 20, "n": 3}, 64),
        (COMPLETIONS, {"prompt": ["four", "sixsix"], "max_tokens": 20, "n": 3}, 130),
        # OpenAI's default.
        (COMPLETIONS, {"prompt": ["four"]}, 20),
        # Bytes, of which there are at least as many as tokens.
        (COMPLETIONS, {"prompt": ["\N{GRINNING FACE}"], "max_tokens": 7}, 11),
        # No sequence is longer than the context, and none takes less than 10.
        (COMPLETIONS, {"prompt": ["four"], "max_tokens": 2**31 - 1, "n": 2}, 200),
        (COMPLETIONS, {"prompt": ["a" * 5000], "max_tokens": 7, "n": 2}, 200),
        (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 1, "n": 3}, 60),
        (CHAT, {"messages": [FOUR, FOUR], "max_tokens": 20, "n": 2}, 48),
        (CHAT, {"messages": [FOUR], "max_completion_tokens": 20, "max_tokens": 50}, 24),
        # A chat goes on to the end of the context.
        (CHAT, {"messages": [FOUR], "n": 2}, 200),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "four"}] * 2}],
                "max_tokens": 7}, 15),
        (EMBEDDINGS, {"input": ["a"] * 70}, 70),
    ],
)  # fmt: skip
def test_a_request_costs_the_tokens_of_its_sequences(
    path: str, body: dict[str, Any], tokens: int
) -> None:
    room = Room(size=1000, part=10, smallest=100)
    assert call(path, {"model": MODEL} | body).cost(room) == tokens


def test_what_is_at_the_bounds_is_handed_on_unchanged() -> None:
    both = {
        "n": MAX_N,
        "max_tokens": 2**31 - 1,
        "temperature": 2.0,
        "top_p": 1.0,
        "top_k": -1,
        "frequency_penalty": -2.0,
        "presence_penalty": 2.0,
        "logit_bias": {"7": -100.0, "49151": 100.0},
        "seed": -(2**63),
        "stop": ["a", "b", "c", "d" * 256],
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "user": "u" * 256,
    }
    messages = [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [TEXT, TEXT], "name": "me"},
        {"role": "assistant", "content": ""},
    ]
    chat = both | {"model": MODEL, "messages": messages, "logprobs": True, "top_logprobs": 20}
    chat |= {"max_completion_tokens": 1, "reasoning_effort": "none"}
    assert taken(CHAT, chat) == chat
    completion = both | {"model": MODEL, "prompt": ["a"], "logprobs": 20, "n": 1}
    assert taken(COMPLETIONS, completion) == completion


def test_nulls_and_an_answers_own_message_are_taken() -> None:
    answered = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": []}
    nulls = {"stop": None, "n": None, "seed": None, "max_tokens": None, "logit_bias": None}
    handed_on = taken(CHAT, GOOD[CHAT] | nulls | {"messages": [USER, answered]})
    assert handed_on == {
        "model": MODEL,
        "messages": [USER, {"role": "assistant", "content": "x"}],
    }


def test_what_openais_client_sends_is_taken() -> None:
    async def calls() -> None:
        client = openai.AsyncOpenAI(
            base_url="http://test/v1", api_key=KEY, http_client=http(guard())
        )
        await client.chat.completions.create(
            model=MODEL,
            messages=[
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "t"}]},
            ],
            max_completion_tokens=5,
            n=2,
            stop="x",
            temperature=0.5,
            logprobs=True,
            top_logprobs=3,
            seed=1,
            user="me",
        )
        await client.completions.create(
            model=MODEL, prompt=["a", "b"], max_tokens=5, logit_bias={"3": -100}, stop=["x"]
        )
        await client.embeddings.with_raw_response.create(
            model=MODEL, input=["a"], user="me", encoding_format="float"
        )
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "t"}], n=17
            )
        assert refused.value.param == "n"

    asyncio.run(calls())


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_what_our_own_engine_sends_is_taken(api: Any) -> None:
    path = CHAT if api == "chat" else COMPLETIONS
    samplings = [
        Sampling(max_tokens=5, temperature=0.7, top_p=0.9, top_k=50, stop=("\n\n", "END")),
        Sampling(max_tokens=5),
    ]
    with running_server() as server:
        config = EngineConfig(model="m", base_url=server.url, api_key="k", api=api)
        engine = OpenAIEngine(config)
        engine.generate([Prompt("one", "begin"), Prompt("two", "")], samplings)
    assert len(server.requests) == 2
    for _, body in server.requests:
        assert taken(path, body) == {k: v for k, v in body.items() if v is not None} | (
            {"prompt": [body["prompt"]]} if api == "completions" else {}
        )


TEXTS = st.text(st.sampled_from('a,[]{}":\\\n'), max_size=8)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=30,
)


def entries(value: Any) -> int:
    """Count the entries of all lists and objects in `value`; an empty one counts as one."""
    if not isinstance(value, list | dict):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return max(1, len(value)) + sum(map(entries, inner))


@given(VALUES, st.integers(0, 40))
@example({"a": '"' * 50}, 1)
@example(["\\"] * 3, 3)
@example(["\\"] * 3, 2)
def test_entries_are_counted_without_parsing(value: Any, most: int) -> None:
    assert has_few_entries(json.dumps(value).encode(), most) == (entries(value) <= most)


@pytest.mark.parametrize(
    "more",
    [
        {"logit_bias": {str(token): "x" for token in range(75_000)}},
        {f"k{number}": 1 for number in range(85_000)},
        {"messages": [[]] * 100_000},
        {"stop": [1] * 5000},
    ],
    ids=["logit_bias", "unknown keys", "lists", "stop"],
)
def test_a_body_of_too_many_entries_reaches_no_endpoint(more: dict[str, Any]) -> None:
    async def never(request: Request) -> Response:
        raise AssertionError

    answer = ask(
        guard(never, limits={"max_request_bytes": 2_000_000}), json={"model": MODEL} | more
    )
    assert_openais(answer, 413, "request_too_large")
    assert "4096 entries" in answer.json()["error"]["message"]


def test_a_text_may_have_as_many_brackets_as_it_likes() -> None:
    texts = [text * 20_000 for text in ("[{,", '"', '\\"', "\\")]
    answer = ask(guard(), COMPLETIONS, json={"model": MODEL, "prompt": texts})
    assert answer.json()["body"]["prompt"] == texts


@pytest.mark.parametrize("text", [rb'"\ud800"', b'["a\xed\xa0\x80b"]', rb'"\ude00\ud83d"'])
def test_lone_surrogates_which_no_tokenizer_reads_are_refused_and_pairs_are_not(
    text: bytes,
) -> None:
    def sent(prompt: bytes) -> Any:
        content = b'{"model": "%s", "prompt": %s}' % (MODEL.encode(), prompt)
        headers = {"Content-Type": "application/json"}
        return ask(guard(), COMPLETIONS, content=content, headers=headers)

    assert_openais(sent(text), 400, "invalid_json")
    assert sent(rb'"\ud83d\ude00"').json()["body"]["prompt"] == ["\N{GRINNING FACE}"]


def test_a_long_mapping_is_refused_before_its_entries_are_looked_at() -> None:
    wrong = {f"w{token}": "x" for token in range(MAX_BIASES + 1)}
    answer = ask(guard(), COMPLETIONS, json=GOOD[COMPLETIONS] | {"logit_bias": wrong})
    assert_openais(answer, 400, "invalid_value")
    assert f"at most {MAX_BIASES} tokens" in answer.json()["error"]["message"]


def test_a_keys_bodies_are_read_one_at_a_time_and_others_in_between() -> None:
    order: list[str] = []

    async def note(request: Request) -> Response:
        order.append((await request.json())["user"])
        return JSONResponse({})

    async def scenario() -> None:
        app = guard(note)
        async with http(app, OTHER) as flood, http(app, KEY) as good:
            sent = [flood.post(CHAT, json=GOOD[CHAT] | {"user": "flood"}) for _ in range(100)]
            sent.append(good.post(CHAT, json=GOOD[CHAT] | {"user": "good"}))
            answers = await asyncio.gather(*sent)
        assert {answer.status_code for answer in answers} == {200}

    asyncio.run(scenario())
    assert len(order) == 101
    # It came last, and waited for some of the hundred only.
    assert order.index("good") < 50
