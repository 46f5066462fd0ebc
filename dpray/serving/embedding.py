"""An embedder answers Ray's OpenAI application as its LLM servers do.

The class is the deployment itself: Serve gathers the texts of several requests into one batch.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from ray import serve

from dpray.engines.embedder import SentenceTransformerEmbedder
from dpray.serving.settings import ServedEmbedder

_FAILURES = 3


class _Embedded(NamedTuple):
    vectors: npt.NDArray[np.float32]
    tokens: int


class CountingEmbedder(SentenceTransformerEmbedder):
    """Counts tokens, up to the model's length, at which a text is cut."""

    def count_tokens(self, texts: Sequence[str]) -> int:
        encoded = self._model.tokenizer(
            list(texts), truncation=True, max_length=self._model.max_seq_length
        )
        return sum(len(ids) for ids in encoded["input_ids"])


class EmbeddingServer:
    """Embeds a request's texts one batch after the other, so that a long request does not hold up
    those of others."""

    def __init__(self, model: str, served: ServedEmbedder) -> None:
        self._embedder, self._size = CountingEmbedder(model), served.max_batch_size
        self._failures = 0
        self._batch.set_max_batch_size(served.max_batch_size)  # type: ignore[attr-defined]
        self._batch.set_batch_wait_timeout_s(served.batch_wait_seconds)  # type: ignore[attr-defined]

    async def embeddings(self, request: Any, raw_request: object = None) -> AsyncIterator[Any]:
        """Yield OpenAI's answer to vLLM's EmbeddingCompletionRequest, checked by the guard."""
        # Imported late: it imports vLLM.
        from ray.serve.llm.openai_api_models import EmbeddingResponse

        texts = [request.input] if isinstance(request.input, str) else request.input
        starts = range(0, len(texts), self._size)
        parts = [await self._batch(tuple(texts[at : at + self._size])) for at in starts]
        vectors = np.concatenate([part.vectors for part in parts])
        tokens = sum(part.tokens for part in parts)
        data = [
            {"index": index, "embedding": _encoded(vector, request.encoding_format)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        yield EmbeddingResponse(model=request.model, data=data, usage=usage)

    @serve.batch(batch_size_fn=lambda requests: sum(map(len, requests)))
    async def _batch(self, requests: list[tuple[str, ...]]) -> list[_Embedded]:
        try:
            embedded = await asyncio.to_thread(self._embed, requests)
        except Exception:
            self._failures += 1
            raise
        self._failures = 0
        return embedded

    def _embed(self, requests: list[tuple[str, ...]]) -> list[_Embedded]:
        vectors = self._embedder.embed([text for request in requests for text in request])
        parts = np.split(vectors, np.cumsum([len(request) for request in requests])[:-1])
        counts = map(self._embedder.count_tokens, requests)
        return [_Embedded(*each) for each in zip(parts, counts, strict=True)]

    def check_health(self) -> None:
        """Raise if the last few batches failed, as all do after an error of the GPU."""
        if self._failures >= _FAILURES:
            raise RuntimeError("the model failed several times in a row")


def _encoded(vector: npt.NDArray[np.float32], encoding: str) -> str | list[float]:
    if encoding == "base64":
        return base64.b64encode(np.ascontiguousarray(vector, dtype="<f4").tobytes()).decode()
    return [float(value) for value in vector]
