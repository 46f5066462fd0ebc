"""An actor works through slices of blocks of groups; its engine does not wait for the next slice.

The worker and its engine are in a thread of their own, so that a call can bring another slice while
the engine decodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpray.engines.base import EngineError
from dpray.workers.engine import WorkerError, try_to_load
from dpray.workers.placement import hide_other_gpus
from dpray.workers.rows import Row

OUTCOME_SECONDS = 10.0
"""An outcome waits at most so long for others of its task: what is not handed over is lost with the
actor, and no progress shows it."""

Outcome = dict[str, Any]
"""An `Outcome` holds plain JSON values; its reader knows which. One of them is its group's name,
under the name of the rows' column of groups."""


class GroupWorker(Protocol):
    attempt_id: str
    """The ledger records under this id which groups the worker has begun."""

    def work(self, tasks: Iterable[list[Row]]) -> Generator[Outcome]:
        """Yield an outcome for each group. If a task holds any row of a group, it holds all of
        them. The next task is taken when there is room for it. Raises EngineError where the engine
        failed, after which the worker is not asked again."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Answer:
    """An `Answer` holds outcomes of the worker with this `attempt_id`. `is_ready` says that the
    actor waits for a slice, or for the end (`GroupActor.finish`), and `is_idle`
    that nothing is under way."""

    attempt_id: str
    outcomes: list[Outcome]
    is_ready: bool
    is_idle: bool


@dataclass(frozen=True)
class _Event:
    """The engine's thread says by an `_Event` that it has taken the last task of a slice, or that
    the worker has ended, and with which error."""

    has_ended: bool
    error: BaseException | None = None


class GroupActor:
    """A `GroupActor` delegates to its worker; it has one caller. Where the worker cannot be made,
    `load` answers with the reason; where its engine fails, `more` does. It is not used then."""

    def __init__(
        self,
        make_worker: Callable[[], GroupWorker],
        key: str,
        task_size: int,
        patience: float = OUTCOME_SECONDS,
    ) -> None:
        hide_other_gpus()
        self._key, self._task_size, self._patience = key, task_size, patience
        # An engine is built and used in one thread: what libraries keep for each thread (the
        # device, the pool of OpenMP) stays the same.
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._worker = self._thread.submit(try_to_load, make_worker).result()
        self._slices: SimpleQueue[list[pa.Table] | None] = SimpleQueue()
        self._came: SimpleQueue[Outcome | _Event] = SimpleQueue()
        self._is_ready = self._is_idle = True

    def load(self) -> Answer | WorkerError:
        return self._worker if isinstance(self._worker, WorkerError) else self._answer([])

    def take(
        self, block: pa.Table, number: int, count: int, only: Collection[str] | None
    ) -> list[str]:
        """Take slice `number` of the `count` of a block, or its groups that are in `only`, and
        return the groups' names. The slice's rows are kept, and not the block."""
        rows = slice_of(block, self._key, number, count, only)
        if self._is_idle:
            self._slices = SimpleQueue()
            self._thread.submit(self._decode, self._slices)
        self._slices.put(tasks(rows, self._key, self._task_size))
        self._is_ready = self._is_idle = False
        names: list[str] = rows.column(self._key).unique().to_pylist()
        return names

    def finish(self) -> None:
        """Let the engine run empty."""
        self._slices.put(None)
        self._is_ready = self._is_idle

    def more(self) -> Answer | WorkerError:
        """Wait for the outcomes of as many groups as a task has, or of fewer that came within
        `patience` seconds, until the engine has taken its last task, or until nothing is under way.
        Raises what the worker raised, and returns the reason where its engine failed: both after
        the outcomes that came before."""
        outcomes: list[Outcome] = []
        deadline = math.inf
        while not self._is_ready and len(outcomes) < self._task_size:
            left = max(0.0, deadline - monotonic())
            try:
                came = self._came.get(timeout=None if math.isinf(left) else left)
            except Empty:
                break
            deadline = min(deadline, monotonic() + self._patience)
            if not isinstance(came, _Event):
                outcomes.append(came)
            elif came.error is None:
                self._is_ready, self._is_idle = True, came.has_ended
            elif outcomes:
                self._came.put(came)  # which is the last one
                break
            elif isinstance(came.error, EngineError):
                return WorkerError(str(came.error), bad_input=False)
            else:
                raise came.error
        return self._answer(outcomes)

    def _answer(self, outcomes: list[Outcome]) -> Answer:
        assert not isinstance(self._worker, WorkerError)
        return Answer(self._worker.attempt_id, outcomes, self._is_ready, self._is_idle)

    def _decode(self, slices: SimpleQueue[list[pa.Table] | None]) -> None:
        """Have the worker work until there are no more slices; in the engine's thread."""
        assert not isinstance(self._worker, WorkerError)
        error: BaseException | None = None
        try:
            for outcome in self._worker.work(self._tasks(slices)):
                self._came.put(outcome)
        except BaseException as raised:  # nobody else would hear of it
            error = raised
        self._came.put(_Event(has_ended=True, error=error))

    def _tasks(self, slices: SimpleQueue[list[pa.Table] | None]) -> Iterator[list[Row]]:
        """Yield the rows of one task after the other: no others are made Python objects. Ask for
        the next slice when the last task of one is taken, which lasts the engine for a while."""
        while (waiting := slices.get()) is not None:
            for task in waiting[:-1]:
                yield task.to_pylist()
            self._came.put(_Event(has_ended=False))
            for task in waiting[-1:]:
                yield task.to_pylist()


def slice_of(
    block: pa.Table, key: str, number: int, count: int, only: Collection[str] | None = None
) -> pa.Table:
    """Return the rows of slice `number` of a block that is cut in `count`, or those of its groups
    that are in `only`. The names alone decide where a slice begins: a block that is gathered anew
    has the same ones."""
    names = sorted(block.column(key).unique().to_pylist())
    start, end = len(names) * number // count, len(names) * (number + 1) // count
    chosen = [name for name in names[start:end] if only is None or name in only]
    return block.filter(pc.is_in(block.column(key), pa.array(chosen, block.schema.field(key).type)))


def tasks(rows: pa.Table, key: str, task_size: int) -> list[pa.Table]:
    """Cut rows into tasks of about `task_size` groups."""
    rows = rows.sort_by(key)
    groups = pc.run_end_encode(rows.column(key).combine_chunks())
    ends = np.array([0, *groups.run_ends.to_pylist()])
    number = round((len(ends) - 1) / task_size) or min(1, len(ends) - 1)
    places = ends[np.linspace(0, len(ends) - 1, number + 1).astype(int)]
    return [rows.slice(start, end - start) for start, end in pairwise(places)]
