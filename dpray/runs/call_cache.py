"""Finished calls of a language model, kept so that a run that resumes pays for none of them twice.

One SQLite file of a run. What is in it was asked for with public prompts: no private text. A call
is named by its request id and bound to a digest of what was asked; the same id with another digest
is an error, because then the run is not the one that stopped.

A call outlives the process from the moment `put` returns. A power cut may take the last ones
(WAL, synchronous=NORMAL: no wait for the disk at each call), which are then asked again.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dpray.io.files import touch_private
from dpray.types import DprayError, valid_unicode

CALLS = "calls.db"
"""What a run's file is called."""

_SECONDS_TO_WAIT = 60
_IDS_IN_ONE_QUERY = 500

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
    """The file cannot be read or written, or an id stands for another call. Without any text."""


@dataclass(frozen=True)
class Totals:
    """What all calls of the run cost so far; 0 tokens where an endpoint did not say."""

    calls: int
    prompt_tokens: int
    completion_tokens: int


class CallCache:
    """The calls in one file, which is made where it is missing. Safe to use from several threads.

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
        """Keep a finished call. One that is there already stays as it is."""
        row = (request_id, digest, valid_unicode(text), prompt_tokens, completion_tokens)
        with self._errors():
            added = self._connection.execute(
                "INSERT INTO calls VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING", row
            ).rowcount
        if not added:
            self.get({request_id: digest})

    def get(self, digests: Mapping[str, str]) -> dict[str, str]:
        """The texts of those calls that are there, by request id; `digests` says what each of them
        has to have asked."""
        texts: dict[str, str] = {}
        ids = list(digests)
        for start in range(0, len(ids), _IDS_IN_ONE_QUERY):
            part = ids[start : start + _IDS_IN_ONE_QUERY]
            marks = ", ".join("?" * len(part))
            query = f"SELECT request_id, digest, text FROM calls WHERE request_id IN ({marks})"
            with self._errors():
                rows = self._connection.execute(query, part).fetchall()
            for request_id, digest, text in rows:
                if digest != digests[request_id]:
                    raise CallCacheError(
                        f"{self._path}: call {request_id} was asked with another prompt: the file "
                        "belongs to another run"
                    )
                texts[request_id] = text
        return texts

    def totals(self) -> Totals:
        query = "SELECT COUNT(*), TOTAL(prompt_tokens), TOTAL(completion_tokens) FROM calls"
        with self._errors():
            calls, prompt_tokens, completion_tokens = self._connection.execute(query).fetchone()
        return Totals(calls, int(prompt_tokens), int(completion_tokens))

    def close(self) -> None:
        with self._errors():
            self._connection.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """One statement at a time; the database's errors in one line."""
        try:
            with self._lock:
                yield
        except sqlite3.Error as error:
            raise CallCacheError(f"{self._path}: {error}") from None


def forget_calls(path: Path) -> None:
    """Remove the file, and what SQLite keeps beside it."""
    for end in ("", "-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)
