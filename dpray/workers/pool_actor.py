"""An actor of a pool delegates to its worker, which works in a thread of its own.

So a call can bring the next part of the work while the worker is still busy with the last one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any, Protocol, TypeVar

from dpray.engines.base import EngineError
from dpray.types import DprayError
from dpray.workers.engine import LoadError, hide_other_gpus, try_to_load

T = TypeVar("T")

OUTCOME_SECONDS = 10.0
"""An outcome waits at most this long for others: what is not handed over is lost with the actor,
and no progress shows it."""

Result = tuple[Any, Any]
"""The name of an item of the work, and its outcome."""

Emit = Callable[[Hashable, Any], None]
"""Hands over the outcome of the item with this name."""


class Parts:
    """A queue of parts of the work, which ends with `end`. The worker iterates over it, and calls
    `ask` when it has room for the next part."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self.ask = ask
        self._given: SimpleQueue[object] = SimpleQueue()

    def give(self, part: object) -> None:
        self._given.put(part)

    def end(self) -> None:
        self._given.put(None)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._given.get, None)


class PoolWorker(Protocol):
    worker_id: str
    """The name under which the ledger knows what this worker began."""

    def accept(self, *part: Any) -> tuple[Collection[Hashable], Any]:
        """Return the names of the items of a part of the work, and the part as `work` takes it. The
        last argument is the set of the items to do, or None for all of them."""
        ...

    def work(self, parts: Parts, emit: Emit) -> None:
        """Do the parts, and hand each item's outcome over. An EngineError means that the engine
        failed. After an error the worker is not asked again."""
        ...


@dataclass(frozen=True)
class Answer:
    """The results that have come, of the worker with this `worker_id`. `is_ready`: the actor waits
    for another part of the work, or for the end. `is_idle`: nothing is under way. `error`: the
    worker's own error, or the reason why there is no worker. It is a value, because Ray would log a
    raised one with a traceback, whose causes may quote a text."""

    worker_id: str
    results: list[Result]
    is_ready: bool
    is_idle: bool
    error: Exception | None = None


@dataclass(frozen=True)
class _Event:
    """The worker asks for the next part of the work, or has ended, with or without an error."""

    has_ended: bool
    error: BaseException | None = None


class PoolActor:
    """One caller's actor, with an engine. It is not used again after an answer with an error.

    The engine is loaded and used in one thread: what libraries keep for each thread (the device,
    the pool of OpenMP) stays the same.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        hide_other_gpus()
        self._results: SimpleQueue[Result | _Event] = SimpleQueue()
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._parts = Parts(self._ask)
        self._is_ready = self._is_idle = True
        # A daemon: the interpreter does not wait for it, so the actor ends with its owner.
        Thread(target=self._serve, daemon=True).start()
        self._engine = self._made(load)

    def tried(self) -> LoadError | None:
        """Return once the engine is loaded, with the reason if it is not."""
        return self._engine if isinstance(self._engine, LoadError) else None

    def load(
        self,
        make_worker: Callable[[Any], PoolWorker],
        most: int,
        patience: float = OUTCOME_SECONDS,
    ) -> Answer:
        """Make the worker, which has the engine. `more` then waits for `most` results, and for
        `patience` seconds."""
        if (error := self.tried()) is not None:
            return Answer("", [], False, True, error)
        self._most, self._patience = most, patience
        self._worker = self._made(partial(make_worker, self._engine))
        if isinstance(self._worker, Exception):
            return Answer("", [], False, True, self._worker)
        return self._answer([])

    def take(self, *part: object) -> list[Hashable]:
        """Take a part of the work, and return the names of its items."""
        assert not isinstance(self._worker, Exception)
        names, accepted = self._worker.accept(*part)
        if self._is_idle:
            self._parts = Parts(self._ask)
            self._calls.put(partial(self._work, self._worker, self._parts))
        self._parts.give(accepted)
        self._is_ready = self._is_idle = False
        return list(names)

    def finish(self) -> None:
        """Let the worker run empty."""
        self._parts.end()
        self._is_ready = self._is_idle

    def more(self) -> Answer:
        """Wait for `most` results, for fewer that came within `patience` seconds, until the worker
        asks for the next part of the work, or until nothing is under way. An error comes after all
        results. Raises an error of the worker that is neither dpray's nor an engine's."""
        results: list[Result] = []
        deadline = math.inf
        while not self._is_ready and len(results) < self._most:
            left = max(0.0, deadline - monotonic())
            try:
                found = self._results.get(timeout=None if math.isinf(left) else left)
            except Empty:
                break
            deadline = min(deadline, monotonic() + self._patience)
            if not isinstance(found, _Event):
                results.append(found)
            elif found.error is None:
                self._is_ready, self._is_idle = True, found.has_ended
            elif results:
                self._results.put(found)  # the last one there is
                break
            elif isinstance(found.error, DprayError | EngineError):
                return Answer("", [], False, True, found.error)
            else:
                raise found.error
        return self._answer(results)

    def _answer(self, results: list[Result]) -> Answer:
        assert not isinstance(self._worker, Exception)
        return Answer(self._worker.worker_id, results, self._is_ready, self._is_idle)

    def _ask(self) -> None:
        self._results.put(_Event(has_ended=False))

    def _serve(self) -> None:
        while True:
            self._calls.get()()

    def _made(self, make: Callable[[], T]) -> T | LoadError:
        """Return what `make` makes in the thread."""
        made: Future[T | LoadError] = Future()

        def call() -> None:
            try:
                made.set_result(try_to_load(make))
            except BaseException as error:  # the caller waits
                made.set_exception(error)

        self._calls.put(call)
        return made.result()

    def _work(self, worker: PoolWorker, parts: Parts) -> None:
        try:
            worker.work(parts, lambda name, outcome: self._results.put((name, outcome)))
        except Exception as error:
            self._results.put(_Event(has_ended=True, error=error))
        except BaseException as error:
            # Nobody asked this thread to exit. Ray would log the words of a SystemExit, and take
            # the actor for lost.
            ended = RuntimeError(type(error).__name__)
            self._results.put(_Event(has_ended=True, error=ended))
        else:
            self._results.put(_Event(has_ended=True))
