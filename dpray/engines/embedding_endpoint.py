"""`EmbeddingEndpoint` embeds PUBLIC texts at an OpenAI-compatible endpoint, such as that of
`dpray serve`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from dpray.config.sections import EmbedderConfig
from dpray.engines.base import Embeddings, EndpointBusy, EngineError
from dpray.types import InputError, Resumable

if TYPE_CHECKING:
    import openai


TEXTS_A_CALL = 13
"""Few: a server may give each caller a small part of its room, as `dpray serve` does."""

SAME_MODEL = 0.99
"""The least cosine of the endpoint's vector and the local one of a public text. Between float32 on
a CPU and bfloat16 on a GPU it is 0.9999; other models make other vectors."""

PUBLIC_TEXTS = (
    "patients and prices",
    "The train to the coast leaves at noon.",
    "Wie wird das Wetter morgen?",
)


class EmbeddingEndpoint:
    """Embeds texts that anybody may read: populations, terms, public texts of topics.

    Claim: no private text reaches it. It is given public texts only; what embeds private rows
    (`dpray.workers.shards.Voters`) has its own copy of the model and is not given this one. Its
    vectors are public inputs, so that nothing it answers, wrong vectors
    included, changes what a run costs.
    """

    def __init__(self, config: EmbedderConfig) -> None:
        self._config = config

    def embed(self, texts: Sequence[str], like_ND: Embeddings | None = None) -> Embeddings:
        """Return L2-normalised vectors, shape (number of texts, dimension). A text without words
        has the vector 0, as many servers refuse it. `like_ND` are the vectors of `PUBLIC_TEXTS`
        that the others are compared with: they are asked for again, because a server may change its
        model. Raises Resumable if the endpoint fails or has another model: the run is paid for, and
        continues when it is called again. No message quotes a text, but for a code of one word that
        the endpoint gives its error."""
        try:
            return self._embedded(texts, like_ND)
        except EngineError as error:
            raise Resumable(f"embedder: {error}") from None

    def check(self, local_ND: Embeddings | None = None) -> None:
        """Call the endpoint once before the charge; compare it with the local model's vectors of
        `PUBLIC_TEXTS`, whose model embeds the private texts. Raises InputError for an endpoint that
        cannot be used or serves another model, Resumable for what may pass."""
        try:
            self._embedded([], local_ND)
        except EndpointBusy as error:
            raise Resumable(f"embedder: {error}; try again later") from None
        except EngineError as error:
            raise InputError(f"embedder: {error}") from None

    def _embedded(self, texts: Sequence[str], like_ND: Embeddings | None) -> Embeddings:
        """Every call asks for `PUBLIC_TEXTS` too: servers behind one address may differ."""
        # Late: the client takes half a second to import, and few runs call an endpoint.
        from dpray.engines.endpoint import client_of, endpoint_errors

        def ask(part: list[int]) -> Embeddings:
            with endpoint_errors(self._name, "embedder"):
                return self._ask(client, [*PUBLIC_TEXTS, *(texts[i] for i in part)])

        vectors_ND: Embeddings | None = None
        worded = [i for i, text in enumerate(texts) if text.strip()]
        parts = [
            worded[start : start + TEXTS_A_CALL] for start in range(0, len(worded), TEXTS_A_CALL)
        ]
        with (
            client_of(self._config, as_environment_says=False) as client,
            ThreadPoolExecutor(self._config.max_in_flight) as pool,
        ):
            for part, found_BD in zip(parts or [[]], pool.map(ask, parts or [[]]), strict=True):
                public_ND = found_BD[: len(PUBLIC_TEXTS)]
                like_ND = public_ND if like_ND is None else like_ND
                if not same_model(public_ND, like_ND):
                    raise EngineError(
                        f"{self._name}: the endpoint gives a public text another vector than "
                        f"embedder.model {self._config.model} does here, or than it gave before; "
                        "serve that model"
                    )
                if vectors_ND is None:
                    vectors_ND = np.zeros((len(texts), found_BD.shape[1]), np.float32)
                vectors_ND[part] = found_BD[len(PUBLIC_TEXTS) :]
        assert vectors_ND is not None
        return vectors_ND

    def _ask(self, client: openai.OpenAI, texts: list[str]) -> Embeddings:
        answer = client.embeddings.create(model=self._name, input=texts, encoding_format="float")
        try:
            rows = sorted((int(each.index), each.embedding) for each in answer.data)
            found_BD = np.array([row for _, row in rows], np.float64)
        except (AttributeError, TypeError, ValueError, OverflowError):
            raise self._odd("no list of vectors") from None
        if [index for index, _ in rows] != [*range(len(texts))] or found_BD.ndim != 2:
            raise self._odd("not one vector for each text")
        norms_B1 = np.linalg.norm(found_BD, axis=1, keepdims=True)
        if not (np.isfinite(norms_B1) & (norms_B1 > 0)).all():
            raise self._odd("a vector that is 0 or not finite")
        vectors_BD: Embeddings = (found_BD / norms_B1).astype(np.float32)
        return vectors_BD

    @property
    def _name(self) -> str:
        return self._config.served_name or self._config.model

    def _odd(self, what: str) -> EngineError:
        return EngineError(f"{self._name}: the endpoint's answer has {what}")


def same_model(found_ND: Embeddings, other_ND: Embeddings) -> bool:
    """Return whether two models give the same texts like vectors."""
    if found_ND.shape != other_ND.shape:
        return False
    return bool((((found_ND - other_ND) ** 2).sum(axis=1) <= 2 - 2 * SAME_MODEL).all())
