"""Clients that call an endpoint one request after the other, and note when a request failed, and
with which status."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import monotonic

import openai


class Traffic:
    """Notes the ends of requests that were answered and of those that failed, in seconds."""

    def __init__(self) -> None:
        self.answered: list[float] = []
        self.failed: list[tuple[float, str]] = []

    def answered_since(self, began: float) -> int:
        return sum(at > began for at in self.answered)

    def outage(self, began: float) -> float:
        """The seconds from `began` to the last failure; 0 where no request failed."""
        return max((at for at, _ in self.failed), default=began) - began

    def call(self, ask: Callable[[], object], stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                ask()
                self.answered.append(monotonic())
            except openai.OpenAIError as error:
                status = getattr(error, "status_code", type(error).__name__)
                self.failed.append((monotonic(), str(status)))


@contextmanager
def traffic(ask: Callable[[], object], clients: int = 2) -> Iterator[Traffic]:
    """Call `ask` on so many threads until the context ends."""
    stop, noted = threading.Event(), Traffic()
    with ThreadPoolExecutor(clients) as pool:
        calls = [pool.submit(noted.call, ask, stop) for _ in range(clients)]
        try:
            yield noted
        finally:
            stop.set()
    for each in calls:
        each.result()
