"""Runs whose workers fail at a private text, and a search of every place where a process of a run
may leave a file."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.chaos.rehearsed import METHODS, write_words
from tests.clusters import TOKEN
from tests.integration.metrics_pages import Pages
from tests.integration.processes import MARKER, TIMEOUT, Cluster, Runs

FAULTY_WORKERS = str(Path(__file__).with_name("faulty_workers.py"))


def with_faulty_workers(run: Runs, method: str, place: str, fault: str) -> Runs:
    """Give a run the settings of a method of `rehearsed`, and workers that fail."""
    run.tree["method"] = dict(METHODS[method])
    if method == "dp_kps":
        run.tree["method"]["vocabulary"] = write_words(run.folder)
    if method != "dp_sgd":
        run.with_fault("none")
    run.program = [FAULTY_WORKERS, place, fault, str(run.marker)]
    return run


def files(*folders: Path) -> Iterator[Path]:
    """Yield the files in some folders; no sockets, pipes and links."""
    for folder in folders:
        for path in folder.rglob("*"):
            try:
                if stat.S_ISREG(os.lstat(path).st_mode):
                    yield path
            except FileNotFoundError:
                continue  # a process has removed it


def holding(word: bytes, *folders: Path) -> list[Path]:
    """Return the files in some folders that hold a word, in their names or their bytes."""
    found = []
    for path in files(*folders):
        try:
            if word in os.fsencode(path.name) or word in path.read_bytes():
                found.append(path)
        except FileNotFoundError:
            continue
    return found


def shared_memory(since: float) -> list[Path]:
    """Return the files in shared memory that were written since a time, and core dumps here."""
    places = [*Path("/dev/shm").rglob("*"), *Path.cwd().glob("core*")]
    return [path for path in places if path.is_file() and path.stat().st_mtime >= since]


def assert_closed(cluster: Cluster, since: float, *folders: Path) -> None:
    """Check Ray's session with its spilled objects and logs, the folders that the processes have
    for temporary files and caches, shared memory, core dumps, and the metrics pages."""
    # Not through the link `session_latest`: another driver may make it anew.
    sessions = list(cluster.temp_dir.glob("session_2*"))
    assert sessions
    assert holding(MARKER, *sessions, *folders) == []
    assert [path for path in shared_memory(since) if MARKER in path.read_bytes()] == []
    assert MARKER.decode() not in Pages(cluster).text()


def shown_on_dashboard(cluster: Cluster) -> str:
    """Return what Ray tells whoever has its token of the tasks and actors that failed."""
    found = []
    for what in ("tasks", "actors", "workers"):
        answer = httpx.get(
            f"{cluster.dashboard}/api/v0/{what}?detail=1&limit=1000",
            headers={"Authorization": f"Bearer {TOKEN}"},
            timeout=TIMEOUT,
        )
        found.append(answer.text)
    return "\n".join(found)
