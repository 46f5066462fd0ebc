"""A cache keeps the finished calls of a language model, so that a resumed run pays for none twice.

It is one SQLite file of a run. The prompts are public, so it holds no private text. A call is named
by its request id and bound to a digest of the request; the same id with another digest is an error,
because then the run is not the one that stopped.

A call survives the process from the moment `put` returns. A power cut may lose the last ones (WAL,
synchronous=NORMAL: no wait for the disk at each call), which are then requested again.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path

from dpray.engines.base import Completion, TextGenerator
from dpray.engines.requests import Request
from dpray.io.files import touch_private
from dpray.types import DprayError, valid_unicode

CALLS = "calls.db"
"""A run keeps its calls in the file of this name."""

_SECONDS_TO_WAIT = 60

_TABLE = """
CREATE TABLE IF NOT EXISTS calls (
    request_id TEXT PRIMARY KEY,
    digest TEXT NOT NULL,
    text TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL
) WITHOUT ROWID
"""


class CallCacheError(DprayError):
    """The file cannot be read or written, or an id stands for another call. The message holds no
    text of a call."""


class CallCache:
    """A `CallCache` holds the calls in one file, which is made where it is missing. Several threads
    may use it.

    Every method raises `CallCacheError`.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()
        with self._errors():
            touch_private(str(self._path))
            # Autocommit: every statement is a transaction of its own.
            self._connection = sqlite3.connect(
                self._path, _SECONDS_TO_WAIT, isolation_level=None, check_same_thread=False
            )
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.execute(_TABLE)

    def put(
        self, request_id: str, digest: str, text: str, prompt_tokens: int, completion_tokens: int
    ) -> None:
        """Keep a finished call; one that is there already stays as it is."""
        row = (request_id, digest, valid_unicode(text), prompt_tokens, completion_tokens)
        with self._errors():
            added = self._connection.execute(
                "INSERT INTO calls VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING", row
            ).rowcount
        if not added:
            self.get({request_id: digest})

    def get(self, digests: Mapping[str, str]) -> dict[str, str]:
        """Return the texts of the calls that the cache holds, by request id. `digests` gives the
        digest that each must have."""
        texts: dict[str, str] = {}
        query = (
            "SELECT request_id, digest, text FROM calls "
            "WHERE request_id IN (SELECT value FROM json_each(?))"
        )
        with self._errors():
            rows = self._connection.execute(query, [json.dumps(list(digests))]).fetchall()
        for request_id, digest, text in rows:
            if digest != digests[request_id]:
                raise CallCacheError(
                    f"{self._path}: call {request_id} was asked with another prompt: the file "
                    "belongs to another run"
                )
            texts[request_id] = text
        return texts

    def totals(self) -> dict[str, int]:
        """Return the run's `calls` so far and their `prompt_tokens` and `completion_tokens`; an
        endpoint that reports no tokens adds 0."""
        query = "SELECT COUNT(*), TOTAL(prompt_tokens), TOTAL(completion_tokens) FROM calls"
        with self._errors():
            calls, prompts, completions = map(int, self._connection.execute(query).fetchone())
        return {"calls": calls, "prompt_tokens": prompts, "completion_tokens": completions}

    def close(self) -> None:
        with self._errors():
            self._connection.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Run one statement at a time, and raise the database's errors in one line."""
        try:
            with self._lock:
                yield
        except sqlite3.Error as error:
            raise CallCacheError(f"{self._path}: {error}") from error


def forget_calls(path: Path) -> None:
    """Remove the file and those that SQLite keeps beside it."""
    for end in ("", "-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)


def ask_cached(
    engine: TextGenerator,
    cache: CallCache,
    requests: Sequence[Request],
    on_completion: Callable[[], None] = lambda: None,
) -> list[str]:
    """Return the texts of the requests, in their order. Only what the cache does not hold is
    generated, and every text is kept as soon as it is finished, so that neither an error nor a
    killed process loses a text that was paid for.

    `on_completion` is called once for each request when its text is there, for cached ones at once.
    Texts come from the cache alone, so a resumed run sees the very texts that the first one saw.
    Raises what the engine and the cache raise, and ValueError for an id that occurs twice.
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
        cache.put(asked, digests[asked], done.text, done.prompt_tokens, done.completion_tokens)
        on_completion()

    if missing:
        prompts = [request.prompt for request in missing]
        engine.generate(prompts, [request.sampling for request in missing], keep)
        known |= cache.get({r.request_id: digests[r.request_id] for r in missing})
    return [known[request.request_id] for request in requests]


def digest(request: Request) -> str:
    """Return a digest of the prompt and the sampling parameters, but not of the id."""
    asked = [astuple(request.prompt), astuple(request.sampling)]
    return hashlib.blake2b(json.dumps(asked).encode(), digest_size=16).hexdigest()
