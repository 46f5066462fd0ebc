"""A watch on files that any process opens."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any


class Opened:
    """The files that any process opened while this was held (Linux's inotify)."""

    IN_OPEN = 0x20

    def __init__(self, paths: list[Path]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = libc.inotify_init1(os.O_NONBLOCK)
        self.watches = [
            libc.inotify_add_watch(self.descriptor, os.fsencode(path), self.IN_OPEN)
            for path in paths
        ]
        assert self.descriptor >= 0 and min(self.watches) >= 0

    def flags(self) -> list[bool]:
        try:
            events = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            events = b""
        # A watch of a file has no name: every event is 16 bytes, its watch in the first four.
        seen = {int.from_bytes(events[at : at + 4], "little") for at in range(0, len(events), 16)}
        return [watch in seen for watch in self.watches]

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: Any) -> None:
        os.close(self.descriptor)
