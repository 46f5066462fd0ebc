"""An `Embedder` answers OpenAI's embeddings API."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dpray.engines.embedder import SentenceTransformerEmbedder
from dpray.serving.errors import model_not_found
from dpray.serving.requests import refuse_unknown, wrong_key

_KEYS = frozenset({"model", "input", "encoding_format", "dimensions", "user"})
_FAILURES = 3


@dataclass(frozen=True)
class EmbeddingCall:
    """The texts of a valid request and the encoding of the vectors."""

    texts: tuple[str, ...] = field(repr=False)
    encoding: str

    def parts(self, size: int) -> list[tuple[str, ...]]:
        """Cut the texts into runs of at most `size`."""
        return [self.texts[at : at + size] for at in range(0, len(self.texts), size)]


@dataclass(frozen=True)
class Embedded:
    """`vectors` have the shape (texts, dimension); `tokens` were read by the model."""

    vectors: npt.NDArray[np.float32] = field(repr=False)
    tokens: int


def parse_embedding_call(body: dict[str, Any], model: str, max_inputs: int) -> EmbeddingCall:
    """Check a request. Raises ApiError that names the wrong key and quotes nothing."""
    if body.get("model") != model:
        raise model_not_found([model])
    refuse_unknown(body, _KEYS)
    if body.get("dimensions") is not None:
        raise wrong_key("dimensions", "this model's vectors have one length")
    encoding = body.get("encoding_format", "float")
    if encoding not in ("float", "base64"):
        raise wrong_key("encoding_format", "float or base64")
    given = body.get("input")
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts:
        raise wrong_key("input", "a text, or a list of texts that is not empty")
    if len(texts) > max_inputs:
        raise wrong_key("input", f"at most {max_inputs} texts in one request")
    if not all(isinstance(text, str) and text for text in texts):
        raise wrong_key("input", "texts that are not empty (token ids are of another vocabulary)")
    return EmbeddingCall(tuple(texts), encoding)


def embedding_answer(call: EmbeddingCall, parts: Sequence[Embedded], model: str) -> dict[str, Any]:
    """Make OpenAI's answer of the embedded `call.parts(...)`, in their order."""
    vectors = np.concatenate([part.vectors for part in parts])
    tokens = sum(part.tokens for part in parts)
    return {
        "object": "list",
        "model": model,
        "data": [
            {"object": "embedding", "index": index, "embedding": _encoded(vector, call.encoding)}
            for index, vector in enumerate(vectors)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _encoded(vector: npt.NDArray[np.float32], encoding: str) -> str | list[float]:
    if encoding == "base64":
        return base64.b64encode(np.ascontiguousarray(vector, dtype="<f4").tobytes()).decode()
    return [float(value) for value in vector]


class CountingEmbedder(SentenceTransformerEmbedder):
    """Is an `Embedder` that also counts tokens, up to the model's length, where it cuts a text."""

    def count_tokens(self, texts: Sequence[str]) -> int:
        encoded = self._model.tokenizer(
            list(texts), truncation=True, max_length=self._model.max_seq_length
        )
        return sum(len(ids) for ids in encoded["input_ids"])


class EmbeddingBatch:
    """Embeds the texts of several requests in one call of the model."""

    def __init__(self, embedder: CountingEmbedder) -> None:
        self._embedder = embedder
        self._failures = 0

    def embed(self, requests: Sequence[Sequence[str]]) -> list[Embedded | Exception]:
        """Return each request's vectors, in their order, or the error of one that failed."""
        answers = self._embed(requests)
        failed = all(isinstance(answer, Exception) for answer in answers)
        self._failures = self._failures + 1 if failed else 0
        return answers

    def _embed(self, requests: Sequence[Sequence[str]]) -> list[Embedded | Exception]:
        """Embed all in one call; where that fails, each by itself: none fails for another."""
        try:
            vectors = self._embedder.embed([text for request in requests for text in request])
            parts = np.split(vectors, np.cumsum([len(request) for request in requests])[:-1])
            counts = map(self._embedder.count_tokens, requests)
            return [Embedded(*each) for each in zip(parts, counts, strict=True)]
        except Exception as error:
            if len(requests) == 1:
                return [error]
            return [answer for request in requests for answer in self._embed([request])]

    @property
    def healthy(self) -> bool:
        """Return whether the last few batches did not all fail, as they do after a GPU error."""
        return self._failures < _FAILURES
