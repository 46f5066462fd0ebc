"""How far a training on other machines is, as the ledger says: blocks of steps that are done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from dpray.accounting.run_ledger import RunLedger
from dpray.training.journal import steps_of

SECONDS = 2.0


class Watched:
    """While it is entered, `show` is told the number of finished steps from time to time."""

    def __init__(self, ledger: RunLedger, key: str, show: Callable[[int], None]) -> None:
        self._ledger, self._key, self._show = ledger, key, show
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._ended.wait(SECONDS):
            try:
                units = [unit for unit, _ in self._ledger.published(self._key)]
            except Exception:
                return  # no picture of the progress is no reason to stop; the training will see
            self._show(sum(map(steps_of, units)))

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._thread.join()
