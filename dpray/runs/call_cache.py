"""The finished calls of a language model, kept so that a resumed run pays for none twice.

The cache is one file of a run, one JSON array a line. The prompts are public, so it holds no
private text. A call goes by a digest of its request, request id included: the same request in a
later attempt finds its text, and another one finds nothing.

A call survives the process from the moment `put` returns, because the system holds it. The file
stays open and is not synced for each call, which would take a shared volume's time. So a power cut
may lose the last calls, which are then requested again.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import astuple
from itertools import count, takewhile
from pathlib import Path
from typing import NamedTuple

from dpray.engines.base import Completion, TextGenerator
from dpray.engines.requests import MOST_EMPTY, Request, no_text, written
from dpray.io.files import owners_only
from dpray.types import DprayError, valid_unicode

CALLS = "calls.jsonl"
"""The name of a run's file."""


class Call(NamedTuple):
    """One line of the file. `request` is the digest of the request."""

    request: str
    text: str
    prompt_tokens: int
    completion_tokens: int


class CallCache:
    """The calls in one file, by request; the file is made if it is missing. Several threads may put
    calls. Raises DprayError for a file of something else."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._file = open(path, "a+b", buffering=0, opener=owners_only)  # noqa: SIM115 (held)
        self._file.seek(0)
        lines, _, torn = self._file.read().rpartition(b"\n")
        if torn:  # a write that was cut off
            self._file.truncate(self._file.tell() - len(torn))
        try:
            calls = [Call(*json.loads(line)) for line in lines.splitlines()]
        except (ValueError, TypeError):
            raise DprayError(f"{path}: the file holds no calls of a language model") from None
        self.calls = {call.request: call for call in calls}
        self._empty: list[Call] = []
        self._empty_places: set[int] = set()
        self._found = len(self.calls)

    def put(self, call: Call, finish_reason: str = "", place: int | None = None) -> None:
        """Keep a finished call; one that is there already stays as it is. `place` is its number
        among those that were asked for; None: they finish in that order.

        Calls with empty texts are in no file before a text follows them, so that a command that
        goes on makes them again. Raises Resumable if too many that were asked for in a row are
        empty: of calls that are made side by side the empty ones finish first.
        """
        with self._lock:
            if call.request in self.calls:
                return
            place = len(self.calls) if place is None else place
            self.calls[call.request] = call
            self._empty.append(call)
            self._finish_reason = finish_reason
            if call.text:
                self._write(b"".join(json.dumps(each).encode() + b"\n" for each in self._empty))
                self._empty.clear()
                return
            self._empty_places.add(place)
            if (row := self._empty_around(place)) >= MOST_EMPTY:
                raise no_text(row, finish_reason)

    def _empty_around(self, place: int) -> int:
        """Return how many calls in a row, this one among them, were empty."""
        before = takewhile(self._empty_places.__contains__, count(place, -1))
        after = takewhile(self._empty_places.__contains__, count(place + 1))
        return sum(1 for _ in before) + sum(1 for _ in after)

    def _write(self, lines: bytes) -> None:
        """Write lines whole or not at all."""
        end, left = self._file.seek(0, os.SEEK_END), memoryview(lines)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._file.truncate(end)
            raise

    def close(self) -> None:
        self._file.close()

    def check_texts(self) -> None:
        """Raise Resumable if there are calls, and no text."""
        if self._empty and len(self._empty) == len(self.calls):
            raise no_text(len(self._empty), self._finish_reason)

    def totals(self, *, since_opened: bool = False) -> dict[str, int]:
        """Return the run's `calls` so far and their `prompt_tokens` and `completion_tokens`; an
        endpoint that reports no tokens adds 0. With `since_opened`, those that the file had are
        left out."""
        calls = list(self.calls.values())[self._found if since_opened else 0 :]
        return {
            "calls": len(calls),
            "prompt_tokens": sum(call.prompt_tokens for call in calls),
            "completion_tokens": sum(call.completion_tokens for call in calls),
        }


def ask_cached(
    engine: TextGenerator,
    cache: CallCache,
    requests: Sequence[Request],
    on_completion: Callable[[int], None] = lambda tokens: None,
) -> list[str]:
    """Return the texts of the requests, in their order. Only missing ones are generated, and every
    text is kept as soon as it is finished, so that neither an error nor a killed process loses a
    text that was paid for.

    `on_completion` is called once for each request when its text is there, with the tokens that
    were written for it: for cached ones at once, with 0.
    Texts come from the cache only, so a resumed run sees the very texts that the first one saw.
    Raises the errors of the engine and of `CallCache.put`, and ValueError for an id that occurs
    twice.
    """
    if len({request.request_id for request in requests}) != len(requests):
        raise ValueError("two requests have the same id")
    names = [digest(request) for request in requests]
    missing = [i for i, name in enumerate(names) if name not in cache.calls]
    for _ in range(len(names) - len(missing)):
        on_completion(0)

    def keep(place: int, done: Completion) -> None:
        text = valid_unicode(written(done, asked[place]))
        tokens = (done.prompt_tokens, done.completion_tokens)
        cache.put(Call(names[missing[place]], text, *tokens), done.finish_reason, first + place)
        on_completion(done.completion_tokens)

    asked, first = [requests[i] for i in missing], len(cache.calls)
    if asked:
        engine.generate([each.prompt for each in asked], [each.sampling for each in asked], keep)
    return [cache.calls[name].text for name in names]


def digest(request: Request) -> str:
    """Return a digest of the request's id, its prompt and its sampling parameters."""
    asked = [request.request_id, astuple(request.prompt), astuple(request.sampling)]
    return hashlib.blake2b(json.dumps(asked).encode(), digest_size=16).hexdigest()
