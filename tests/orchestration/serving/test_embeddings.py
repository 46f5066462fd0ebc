"""Embeddings as the endpoint answers them, without Ray."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
import openai
import pytest
from starlette.responses import JSONResponse, Response

from dpray.orchestration.serving.embedding import (
    Embedded,
    EmbeddingBatch,
    embedding_answer,
    parse_embedding_call,
)
from tests.orchestration.serving.front import (
    EMBEDDINGS,
    KEY,
    MODEL,
    WORD,
    ask,
    assert_openais,
    gateway,
    http,
)


class ByLength:
    """An embedder whose vectors are the texts' lengths; a token a character."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def embed(self, texts: list[str]) -> Any:
        if "broken" in texts:
            raise RuntimeError(WORD)
        self.calls.append(len(texts))
        return np.array([[len(text), 0.1] for text in texts], dtype=np.float32)

    def count_tokens(self, texts: list[str]) -> int:
        return sum(map(len, texts))


def test_requests_are_embedded_together_and_answered_apart() -> None:
    model = ByLength()
    batch = EmbeddingBatch(model)  # type: ignore[arg-type]

    answers = batch.embed([("a", "bb"), ("ccc",)])

    assert model.calls == [3]
    assert [answer.vectors[:, 0].tolist() for answer in answers] == [[1, 2], [3]]
    assert [answer.tokens for answer in answers] == [3, 3]
    for _ in range(3):
        assert batch.healthy
        with pytest.raises(RuntimeError):
            batch.embed([("broken",)])
    assert not batch.healthy
    batch.embed([("a",)])
    assert batch.healthy


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_openais_client_reads_the_embeddings(encoding: str | None) -> None:
    batch = EmbeddingBatch(ByLength())  # type: ignore[arg-type]

    async def embeddings(body: dict[str, Any], salt: str) -> Response:
        call = parse_embedding_call(body, MODEL, max_inputs=5)
        assert call.encoding == (encoding or "base64")
        return JSONResponse(embedding_answer(call, batch.embed(call.parts(2)), MODEL))

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
    async def embeddings(body: dict[str, Any], salt: str) -> Response:
        parse_embedding_call(body, MODEL, max_inputs=5)
        raise AssertionError

    answer = ask(gateway(embeddings), EMBEDDINGS, json={"model": MODEL, "input": WORD} | changes)
    assert_openais(answer, 404 if param == "model" else 400, code)
    assert answer.json()["error"]["param"] == param


def test_nothing_shows_a_text() -> None:
    call = parse_embedding_call({"model": MODEL, "input": WORD}, MODEL, 5)
    assert WORD not in repr(call) + repr(Embedded(np.zeros((1, 2), np.float32), 3))
