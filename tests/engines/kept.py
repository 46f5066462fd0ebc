"""An engine that several runs use, one after the other."""

from __future__ import annotations

from typing import Any


class Kept:
    """Passes everything on to an engine, and leaves it open."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def close(self) -> None: ...
