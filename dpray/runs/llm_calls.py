"""Calls of a language model that are made once: an engine behind a cache of finished calls."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import astuple

from dpray.engines.base import Completion, TextGenerator
from dpray.engines.requests import Ask, Request
from dpray.runs.call_cache import CallCache


def ask_cached(
    engine: TextGenerator, cache: CallCache, on_completion: Callable[[], None] = lambda: None
) -> Ask:
    """An `Ask` that generates only what the cache does not hold and keeps every text as it is
    finished, so that neither an error nor a killed process loses one that was paid for.

    `on_completion` is called once for each request as its text is there, so for those of the cache
    at once. Texts come from the cache alone: a resumed run sees the very texts the first one saw.
    The `Ask` raises what the engine and the cache raise, and ValueError for an id that is there
    twice.
    """

    def ask(requests: Sequence[Request]) -> list[str]:
        digests = {request.request_id: digest(request) for request in requests}
        if len(digests) != len(requests):
            raise ValueError("two requests have the same id")
        known = cache.get(digests)
        missing = [request for request in requests if request.request_id not in known]
        for _ in known:
            on_completion()

        def keep(index: int, completion: Completion) -> None:
            request_id = missing[index].request_id
            cache.put(
                request_id,
                digests[request_id],
                completion.text,
                completion.prompt_tokens,
                completion.completion_tokens,
            )
            on_completion()

        if missing:
            prompts = [request.prompt for request in missing]
            engine.generate(prompts, [request.sampling for request in missing], keep)
            known |= cache.get({r.request_id: digests[r.request_id] for r in missing})
        return [known[request.request_id] for request in requests]

    return ask


def digest(request: Request) -> str:
    """Of the prompt and the sampling parameters, not of the id."""
    asked = [astuple(request.prompt), astuple(request.sampling)]
    return hashlib.blake2b(json.dumps(asked).encode(), digest_size=16).hexdigest()
