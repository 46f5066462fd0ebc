"""Bodies are bounded before they are parsed, and one key's do not hold up another's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dpray.serving.requests import MAX_BIASES, has_few_entries
from tests.serving.front import (
    CHAT,
    COMPLETIONS,
    GOOD,
    KEY,
    MODEL,
    OTHER,
    ask,
    assert_openais,
    guard,
    http,
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
