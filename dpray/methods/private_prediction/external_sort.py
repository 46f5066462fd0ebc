"""Records are sorted on disk: memory does not grow with their number."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any


def external_sort(
    path: Path, placed: Iterable[tuple[int, dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    """Yield records in the order of their places, which are distinct. `path` is a file that is made
    for this, and removed."""
    path.unlink(missing_ok=True)
    try:
        # Nothing of it has to outlast a crash.
        with closing(sqlite3.connect(path, isolation_level=None)) as database:
            for setting in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -65536"):
                database.execute(f"PRAGMA {setting}")
            database.execute("CREATE TABLE records (place INTEGER PRIMARY KEY, record TEXT)")
            database.execute("BEGIN")
            database.executemany(
                "INSERT INTO records VALUES (?, ?)",
                ((place, json.dumps(record)) for place, record in placed),
            )
            for (record,) in database.execute("SELECT record FROM records ORDER BY place"):
                yield json.loads(record)
    finally:
        path.unlink(missing_ok=True)
