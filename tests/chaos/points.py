"""The points of a run at which it can be killed, each with a name of its own.

A point is the moment before a file of the run is opened for writing, renamed or removed (Python's
audit events tell of all of them), and before, in and after each transaction of the ledger:
`uncommitted` is when all is written and nothing is committed. Nothing in dpray knows of the points,
so a new step of a run is a new point by itself.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from dpray.ledger.ledger import Ledger, Write
from dpray.ledger.store import Store

Reach = Callable[[str], None]
"""Is called with a point's name when the process is there."""

RANDOM = re.compile(r"[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""Ids that differ between two runs of the same configuration."""

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Passed:
    """Numbers the points that this process passes, writes them down, and kills the process at the
    one with the name `deadly`."""

    def __init__(self, deadly: str = "", written_to: Path | None = None) -> None:
        self.deadly, self.written_to = deadly, written_to
        self._times: Counter[str] = Counter()
        self._lock = threading.RLock()

    def __call__(self, point: str) -> None:
        with self._lock:
            self._times[point] += 1
            name = f"{point} #{self._times[point]}"
            if name == self.deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.written_to is not None:
                with open(self.written_to, "a") as file:
                    file.write(f"{name}\n")


class Jumping:
    """Sets the clock of this process forward or back at every point. libfaketime, preloaded, reads
    the offset from a file."""

    def __init__(self, reach: Reach, offset: Path) -> None:
        self.reach, self.offset = reach, offset
        self._offsets = cycle(("+400d", "-400d", "+1h", "+0"))

    def __call__(self, point: str) -> None:
        new = self.offset.with_suffix(".new")
        new.write_text(next(self._offsets))
        new.replace(self.offset)
        self.reach(point)


def arm(reach: Reach, folder: Path) -> None:
    """Call `reach` at every point of a run that writes to `folder`, in this process, for good."""
    watch_files(reach, folder)
    watch_ledger(reach)


def watch_files(reach: Reach, folder: Path) -> None:
    def place(path: Any, descriptor: Any = -1) -> str | None:
        """Return the path below `folder`, without what is random; None for another place."""
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        text = os.fsdecode(path)
        if isinstance(descriptor, int) and descriptor >= 0:
            text = os.path.join(os.readlink(f"/proc/self/fd/{descriptor}"), text)
        if not os.path.abspath(text).startswith(f"{folder}{os.sep}"):
            return None
        return RANDOM.sub("*", os.path.relpath(text, folder))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and writes(*arguments[1:]) and (name := place(arguments[0])) is not None:
            reach(f"write {name}")
        elif event == "os.rename" and (name := place(arguments[1])) is not None:
            reach(f"rename to {name}")
        elif event in ("os.remove", "os.rmdir") and (name := place(*arguments[:2])) is not None:
            reach(f"remove {name}")
        elif event == "os.mkdir" and (name := place(arguments[0], arguments[2])) is not None:
            reach(f"make {name}")

    sys.addaudithook(hook)


def writes(mode: Any, flags: Any) -> bool:
    """Return whether a file is opened to be written. An `opener` tells of it a second time, without
    a mode; it is alone only where a file is made."""
    again = mode is None and not flags & os.O_EXCL
    return isinstance(flags, int) and bool(flags & WRITES) and not again


def watch_ledger(reach: Reach) -> None:
    """Call `reach` at every point of the ledgers that this process opens itself."""
    transact, begin, create = Ledger._transact, Store.begin, Store._create
    at_work = threading.local()

    def watched_transact(ledger: Ledger, writes: Sequence[Write]) -> list[Any]:
        at_work.name = name = "+".join(map(name_of, writes))
        reach(f"before {name}")
        answers = transact(ledger, writes)
        reach(f"after {name}")
        return answers

    @contextmanager
    def watched_begin(store: Store) -> Iterator[sa.Connection]:
        with begin(store) as connection:
            yield connection
            reach(f"uncommitted {at_work.name}")

    def watched_create(store: Store) -> None:
        reach("before the ledger is made")
        create(store)
        reach("after the ledger is made")

    changes = (
        (Ledger, "_transact", watched_transact),
        (Store, "begin", watched_begin),
        (Store, "_create", watched_create),
    )
    for owner, name, watched in changes:
        setattr(owner, name, watched)


def name_of(write: Write) -> str:
    return "trial" if write.options.get("is_trial") else write.operation.__name__
