"""A pool of Ray actors works through blocks of groups; a lost actor is replaced while the others go
on.

The actors have `max_restarts=0` and `max_task_retries=0`: Ray repeats nothing. What was lost with
an actor is left out, and the error that says so is raised when all else is done: the runner
decides what is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.exceptions import RayActorError, RayError

from dpray.config.config import Config
from dpray.engines.base import EngineError
from dpray.runs.cluster import find_error, never_repeated, was_lost
from dpray.runs.engine import WorkerError, try_to_load
from dpray.runs.placement import hide_other_gpus
from dpray.runs.rows import Row
from dpray.runs.together import together

Outcome = dict[str, Any]
"""An `Outcome` holds plain JSON values; its reader knows which."""

TICK = 1.0
"""Seconds after which the pool says that nothing has come."""


class GroupWorker(Protocol):
    def work(self, tasks: Iterable[list[Row]]) -> Generator[Outcome]:
        """Yield an outcome for each group. If a task holds any row of a group, it holds all of
        them. The next task is taken when there is room for it. Raises EngineError where the engine
        failed, after which the worker is not asked again."""
        ...

    def close(self) -> None: ...


class GroupPool:
    """A `GroupPool` has `runtime.actors` actors, each with a worker that `make_worker` makes, and
    hands them blocks in which every group is whole. An actor's worker gets the groups of its block
    about `task_size` at a time, each named in the column `key`.

    The pool does not wait for an actor that the cluster has no room for. An actor that is lost, or
    whose engine fails, is replaced, unless `runtime.max_attempts` in its place were lost without an
    answer.
    """

    def __init__(
        self, config: Config, make_worker: Callable[[], GroupWorker], key: str, task_size: int
    ) -> None:
        runtime = config.runtime
        self._actors = max(runtime.actors, runtime.min_actors)
        self._max_losses = runtime.max_attempts
        actor = never_repeated(GroupActor, config, runtime.gpus_per_actor or 0.0)
        # Sent once, however many actors there are: it may hold a whole plan.
        shared = ray.put(make_worker)
        self._make = lambda: actor.remote(shared, key, task_size)
        self._places: list[_Place] = []

    def work(self, blocks: list[Any]) -> Generator[list[Outcome]]:
        """Yield outcomes, as many at once as a task has groups, in whichever order they come; an
        empty list when nothing has come for `TICK`. Takes the references out of `blocks`, so that
        Ray frees those that are done.

        Raises the error that ended a task, and at the end the one with which an actor, its engine
        or a block was lost. Running out of memory is raised at once, and so is the reason why a
        worker cannot be made in the first place (InputError or EngineError).
        """
        blocks.reverse()
        self._places = [_Place(self._make) for _ in range(min(self._actors, len(blocks)))]
        lost: Exception | None = None
        try:
            while blocks or any(place.is_busy for place in self._places):
                self._hand_out(blocks)
                place = self._next_ready()
                if place is None:
                    yield []
                    continue
                try:
                    outcomes = place.take()
                except (RayError, EngineError) as error:
                    # Running out of memory is no loss, and ends the execution.
                    if not (was_lost(error) or place.engine_failed(error)):
                        raise
                    lost = lost or error
                    if not blocks:
                        place.rest()
                    elif not self._goes_on(place, error):
                        raise
                else:
                    if outcomes:
                        yield outcomes
            if lost is not None:
                raise lost
        finally:
            for place in self._places:
                place.end()

    def _hand_out(self, blocks: list[Any]) -> None:
        """Give every idle actor a block; where there are no more, end the actors without one: the
        cluster may need their machines."""
        for place in list(self._places):
            if blocks and place.is_idle:
                place.hand(blocks.pop())
            elif not blocks and not place.is_busy:
                self._end(place)

    def _end(self, place: _Place) -> None:
        place.end()
        self._places.remove(place)

    def _next_ready(self) -> _Place | None:
        """Return a place whose actor has answered or is lost, the one that waited longest first;
        None where there is none for `TICK`."""
        waiting = {place.answers: place for place in self._places if not place.is_idle}
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=TICK, fetch_local=False)
        if not ready:
            return None
        place = waiting[ready[0]]
        self._places.remove(place)
        self._places.append(place)
        return place

    def _goes_on(self, place: _Place, error: Exception) -> bool:
        """Start another actor in the place of a lost one, or give the place up where that happened
        too often; return False where no place is left."""
        if not isinstance(error, EngineError) and find_error(error, RayActorError) is None:
            place.rest()  # the block was lost, and not the actor
            return True
        place.losses += 1
        if place.losses < self._max_losses:
            place.start()
        else:
            self._end(place)
        return bool(self._places)


class _Place:
    """A `_Place` has one actor at a time. It is idle once the actor's worker is made and it has no
    block, and busy while it has one."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._actor: Any = None
        self._was_made = False
        self.losses = 0
        self.start()

    def start(self) -> None:
        self.end()
        self._actor = self._make()
        # No block waits for a machine.
        self.is_busy = False
        self.answers: Any = self._actor.load.options(num_returns="streaming").remote()

    @property
    def is_idle(self) -> bool:
        return self.answers is None

    def hand(self, block: Any) -> None:
        self.is_busy = True
        self.answers = self._actor.work.options(num_returns="streaming").remote(block)

    def rest(self) -> None:
        self.is_busy, self.answers = False, None

    def take(self) -> list[Outcome]:
        """Return the next outcomes, or none at the end of a block. Raises what ended the task or
        the actor, InputError or EngineError for a worker that cannot be made, and EngineError where
        an engine failed."""
        try:
            answer = ray.get(next(self.answers))
        except StopIteration:
            self.rest()
            self._was_made = True
            return []
        if isinstance(answer, WorkerError):
            raise answer.error()
        self.losses = 0
        outcomes: list[Outcome] = answer
        return outcomes

    def engine_failed(self, error: Exception) -> bool:
        """Return whether this is the error of an engine in whose place one has run before: another
        machine's may run. One that cannot be loaded anywhere would fail everywhere."""
        return isinstance(error, EngineError) and self._was_made

    def end(self) -> None:
        if self._actor is not None:
            ray.kill(self._actor)


class GroupActor:
    """A `GroupActor` delegates to its worker. Where the worker cannot be made, the actor answers
    with the reason, and gets no block."""

    def __init__(self, make_worker: Callable[[], GroupWorker], key: str, task_size: int) -> None:
        hide_other_gpus()
        self._worker = try_to_load(make_worker)
        self._key, self._task_size = key, task_size

    def load(self) -> Iterator[WorkerError]:
        if isinstance(self._worker, WorkerError):
            yield self._worker

    def work(self, block: pa.Table) -> Iterator[list[Outcome] | WorkerError]:
        """Yield the outcomes of a block's groups, `task_size` at a time; the worker gets as many
        groups at a time. The last answer is the reason where its engine failed."""
        assert not isinstance(self._worker, WorkerError)
        outcomes = self._worker.work(tasks(block, self._key, self._task_size))
        try:
            yield from together(([outcome] for outcome in outcomes), self._task_size)
        except EngineError as error:
            yield WorkerError(str(error), bad_input=False)


def tasks(block: pa.Table, key: str, task_size: int) -> Iterator[list[Row]]:
    """Yield the rows of about `task_size` groups at a time: no others are made Python objects."""
    block = block.sort_by(key)
    groups = pc.run_end_encode(block.column(key).combine_chunks())
    ends = np.array([0, *groups.run_ends.to_pylist()])
    number = max(1, round((len(ends) - 1) / task_size))
    for start, end in pairwise(ends[np.linspace(0, len(ends) - 1, number + 1).astype(int)]):
        yield block.slice(start, end - start).to_pylist()
