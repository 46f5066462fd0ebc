"""Embeddings as the endpoint answers them, without Ray."""

from __future__ import annotations

import asyncio
import base64
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
from ray import serve
from starlette.responses import JSONResponse, Response

from dpray.serving import applications
from dpray.serving.costs import embedder_capacity
from dpray.serving.embedding import (
    Embedded,
    EmbeddingBatch,
    embedding_answer,
    parse_embedding_call,
)
from dpray.serving.gateway import Caller
from dpray.serving.places import FairPlaces
from dpray.serving.settings import ServedEmbedder
from tests.serving.front import (
    EMBEDDINGS,
    KEY,
    MODEL,
    OTHER,
    WORD,
    ask,
    assert_openais,
    gateway,
    http,
)


class ByLength:
    """An embedder whose vectors are the texts' lengths; a token a character. Fails on "broken", on
    what a tokenizer refuses, and in counting on "uncountable"."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def embed(self, texts: list[str]) -> Any:
        if "broken" in texts:
            raise RuntimeError(WORD)
        for text in texts:
            text.encode()
        self.calls.append(len(texts))
        return np.array([[len(text), 0.1] for text in texts], dtype=np.float32)

    def count_tokens(self, texts: list[str]) -> int:
        if "uncountable" in texts:
            raise RuntimeError(WORD)
        return sum(map(len, texts))


def lengths(answers: list[Embedded | Exception]) -> list[Any]:
    """The lengths of each request's texts, or the kind of its error."""
    return [
        answer.vectors[:, 0].tolist() if isinstance(answer, Embedded) else type(answer)
        for answer in answers
    ]


def test_requests_are_embedded_together_and_answered_apart() -> None:
    model = ByLength()
    batch = EmbeddingBatch(model)  # type: ignore[arg-type]

    answers = batch.embed([("a", "bb"), ("ccc",)])

    assert model.calls == [3]
    assert lengths(answers) == [[1, 2], [3]]
    assert [answer.tokens for answer in answers if isinstance(answer, Embedded)] == [3, 3]


@pytest.mark.parametrize("bad", ["broken", "uncountable"])
def test_a_request_fails_alone_and_the_model_fails_with_all_of_them(bad: str) -> None:
    batch = EmbeddingBatch(ByLength())  # type: ignore[arg-type]

    for _ in range(4):
        answers = batch.embed([("a",), ("bb", bad), ("ccc", "d")])
        assert lengths(answers) == [[1], RuntimeError, [3, 1]]
        assert batch.healthy
    for requests in ([(bad,)], [(bad,), ("a", bad)], [("a", "bb", bad)]):
        assert batch.healthy
        assert lengths(batch.embed(requests)) == [RuntimeError] * len(requests)
    assert not batch.healthy
    batch.embed([("a",), (bad,)])
    assert batch.healthy


def test_the_actor_hands_each_request_its_own_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ByLength()
    monkeypatch.setattr(applications, "CountingEmbedder", lambda name: model)
    # Serve's batches ask it, for a warning only.
    replica = SimpleNamespace(_deployment_config=SimpleNamespace(max_ongoing_requests=64))
    monkeypatch.setattr(serve, "get_replica_context", lambda: replica)

    async def together() -> list[Any]:
        server = applications.EmbeddingServer(MODEL, ServedEmbedder(batch_wait_seconds=0.2))
        asked = [server.embed(texts) for texts in (("a", "bb"), ("broken",), ("ccc",))]
        return await asyncio.gather(*asked, return_exceptions=True)

    assert lengths(asyncio.run(together())) == [[1, 2], RuntimeError, [3]]
    assert model.calls == [2, 1]


@pytest.mark.parametrize("body", [rb'"\ud800"', b'["a\xed\xa0\x80b", "\\ude00\\ud83d"]'])
def test_a_lone_surrogate_is_embedded_and_costs_nobody_the_model(body: bytes) -> None:
    batch = EmbeddingBatch(ByLength())  # type: ignore[arg-type]

    async def embeddings(body: dict[str, Any], caller: Caller) -> Response:
        call = parse_embedding_call(body, MODEL, max_inputs=5)
        mine, others = batch.embed([call.texts, ("a",)])
        assert isinstance(others, Embedded)
        if isinstance(mine, Exception):
            raise mine
        return JSONResponse(embedding_answer(call, [mine], MODEL))

    app = gateway(embeddings)
    for _ in range(3):
        answer = ask(
            app,
            EMBEDDINGS,
            content=b'{"model": "%s", "input": %s}' % (MODEL.encode(), body),
            headers={"Content-Type": "application/json"},
        )
        assert answer.status_code == 200, answer.text
    assert batch.healthy


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_openais_client_reads_the_embeddings(encoding: str | None) -> None:
    batch = EmbeddingBatch(ByLength())  # type: ignore[arg-type]

    async def embeddings(body: dict[str, Any], caller: Caller) -> Response:
        call = parse_embedding_call(body, MODEL, max_inputs=5)
        assert call.encoding == (encoding or "base64")
        parts = [part for part in batch.embed(call.parts(2)) if isinstance(part, Embedded)]
        return JSONResponse(embedding_answer(call, parts, MODEL))

    async def client_sees(given: str | list[str]) -> Any:
        client = openai.AsyncOpenAI(
            base_url="http://test/v1", api_key=KEY, http_client=http(gateway(embeddings))
        )
        chosen: Any = {"encoding_format": encoding} if encoding else {}
        return await client.embeddings.create(model=MODEL, input=given, **chosen)

    answer = asyncio.run(client_sees(["a", "bb", "ccc"]))
    vectors = [item.embedding for item in answer.data]
    if encoding == "base64":
        vectors = [np.frombuffer(base64.b64decode(v), "<f4").tolist() for v in vectors]
    np.testing.assert_array_equal(np.float32(vectors), np.float32([[1, 0.1], [2, 0.1], [3, 0.1]]))
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert (answer.usage.prompt_tokens, answer.model, answer.object) == (6, MODEL, "list")
    assert len(asyncio.run(client_sees("one")).data) == 1


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"model": WORD}, "model_not_found", "model"),
        ({"model": None}, "model_not_found", "model"),
        ({"input": None}, "invalid_value", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": ""}, "invalid_value", "input"),
        ({"input": [WORD, 3]}, "invalid_value", "input"),
        ({"input": [[1, 2]]}, "invalid_value", "input"),
        ({"input": [WORD] * 6}, "invalid_value", "input"),
        ({"input": {"text": WORD}}, "invalid_value", "input"),
        ({"encoding_format": WORD}, "invalid_value", "encoding_format"),
        ({"encoding_format": []}, "invalid_value", "encoding_format"),
        ({"dimensions": 3}, "invalid_value", "dimensions"),
    ],
)
def test_a_wrong_embedding_request_names_its_key(
    changes: dict[str, Any], code: str, param: str
) -> None:
    async def embeddings(body: dict[str, Any], caller: Caller) -> Response:
        parse_embedding_call(body, MODEL, max_inputs=5)
        raise AssertionError

    answer = ask(gateway(embeddings), EMBEDDINGS, json={"model": MODEL, "input": WORD} | changes)
    assert_openais(answer, 404 if param == "model" else 400, code)
    assert answer.json()["error"]["param"] == param


def test_nothing_shows_a_text() -> None:
    call = parse_embedding_call({"model": MODEL, "input": WORD}, MODEL, 5)
    assert WORD not in repr(call) + repr(Embedded(np.zeros((1, 2), np.float32), 3))


def test_one_keys_many_texts_do_not_keep_another_waiting() -> None:
    """The handle embeds one part after the other."""
    order: list[str] = []

    class Handle:
        def __init__(self) -> None:
            self.embed, self._model = self, asyncio.Lock()

        async def remote(self, part: tuple[str, ...]) -> Embedded:
            async with self._model:
                await asyncio.sleep(0.001)
                order.extend(part)
                return Embedded(np.zeros((len(part), 2), np.float32), 1)

    async def scenario() -> None:
        served = ServedEmbedder(max_batch_size=4)
        places = FairPlaces(embedder_capacity(served, 1))
        app = gateway(applications._embeddings(Handle(), MODEL, served, places))  # type: ignore[arg-type]
        async with http(app, OTHER) as flood, http(app, KEY) as good:
            many = {"model": MODEL, "input": ["flood"] * 400}
            sent = [asyncio.create_task(flood.post(EMBEDDINGS, json=many)) for _ in range(5)]
            while not order:
                await asyncio.sleep(0.001)
            answer = await good.post(EMBEDDINGS, json={"model": MODEL, "input": "good"})
            assert answer.status_code == 200
            assert [len((await each).json()["data"]) for each in sent] == [400] * 5

    asyncio.run(scenario())
    assert len(order) == 2001 and order.index("good") < 200
