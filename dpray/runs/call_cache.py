"""The finished calls of a language model, kept so that a resumed run pays for none twice.

The cache is one file of a run, one JSON array a line. The prompts are public, so it holds no
private text. A call has the name of its request id and is bound to a digest of the request; the
same id with another digest is an error, because then the run is not the one that stopped.

A call survives the process from the moment `put` returns. A power cut may lose the last ones, which
are then requested again.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import NamedTuple

from dpray.engines.base import Completion, TextGenerator
from dpray.engines.requests import Request
from dpray.io.files import owners_only
from dpray.types import DprayError, valid_unicode

CALLS = "calls.jsonl"
"""The name of a run's file."""


class CallCacheError(DprayError):
    """The file is no cache, or an id stands for another call. The message holds no text of a
    call."""


class Call(NamedTuple):
    """One line of the file."""

    request_id: str
    digest: str
    text: str
    prompt_tokens: int
    completion_tokens: int


class CallCache:
    """The calls in one file, which is made if it is missing. Several threads may use it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        with open(path, "a+b", opener=owners_only) as file:
            file.seek(0)
            lines, _, torn = file.read().rpartition(b"\n")
            if torn:  # a write that was cut off
                file.truncate(file.tell() - len(torn))
        try:
            calls = [Call(*json.loads(line)) for line in lines.splitlines()]
        except (ValueError, TypeError):
            raise CallCacheError(f"{path}: the file holds no calls of a language model") from None
        self._calls = {call.request_id: call for call in calls}

    def put(self, call: Call) -> None:
        """Keep a finished call; one that is there already stays as it is."""
        with self._lock:
            if self._known(call.request_id, call.digest) is None:
                with open(self._path, "ab") as file:
                    file.write(json.dumps(call).encode() + b"\n")
                self._calls[call.request_id] = call

    def get(self, digests: Mapping[str, str]) -> dict[str, str]:
        """Return the texts of the calls that the cache holds, by request id. `digests` has the
        digest of each."""
        found = {name: self._known(name, digest) for name, digest in digests.items()}
        return {name: call.text for name, call in found.items() if call is not None}

    def totals(self) -> dict[str, int]:
        """Return the run's `calls` so far and their `prompt_tokens` and `completion_tokens`; an
        endpoint that reports no tokens adds 0."""
        calls = list(self._calls.values())
        return {
            "calls": len(calls),
            "prompt_tokens": sum(call.prompt_tokens for call in calls),
            "completion_tokens": sum(call.completion_tokens for call in calls),
        }

    def _known(self, request_id: str, digest: str) -> Call | None:
        call = self._calls.get(request_id)
        if call is not None and call.digest != digest:
            raise CallCacheError(
                f"{self._path}: call {request_id} was asked with another prompt: the file belongs "
                "to another run"
            )
        return call


def ask_cached(
    engine: TextGenerator,
    cache: CallCache,
    requests: Sequence[Request],
    on_completion: Callable[[], None] = lambda: None,
) -> list[str]:
    """Return the texts of the requests, in their order. Only missing ones are generated, and every
    text is kept as soon as it is finished, so that neither an error nor a killed process loses a
    text that was paid for.

    `on_completion` is called once for each request when its text is there, for cached ones at once.
    Texts come from the cache alone, so a resumed run sees the very texts that the first one saw.
    Raises the errors of the engine and the cache, and ValueError for an id that occurs twice.
    """
    digests = {request.request_id: digest(request) for request in requests}
    if len(digests) != len(requests):
        raise ValueError("two requests have the same id")
    known = cache.get(digests)
    missing = [request for request in requests if request.request_id not in known]
    for _ in known:
        on_completion()

    def keep(index: int, done: Completion) -> None:
        asked = missing[index].request_id
        tokens = (done.prompt_tokens, done.completion_tokens)
        cache.put(Call(asked, digests[asked], valid_unicode(done.text), *tokens))
        on_completion()

    if missing:
        prompts = [request.prompt for request in missing]
        engine.generate(prompts, [request.sampling for request in missing], keep)
        known = cache.get(digests)
    return [known[request.request_id] for request in requests]


def digest(request: Request) -> str:
    """Return a digest of the prompt and the sampling parameters, but not of the id."""
    asked = [astuple(request.prompt), astuple(request.sampling)]
    return hashlib.blake2b(json.dumps(asked).encode(), digest_size=16).hexdigest()
