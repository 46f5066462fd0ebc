"""A pool of Ray actors works through blocks of groups, cut in slices that any actor may take.

The actors have `max_restarts=0` and `max_task_retries=0`: Ray repeats nothing. A group is in the
hands of one actor at a time. Where that one is lost, the groups whose outcomes have not come go to
another actor, and nobody reads what the first one sends from then on, should it be alive.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from dpray.config.config import Config
from dpray.engines.base import EngineError
from dpray.workers.cluster import (
    EndedForMemory,
    LostTooOften,
    ended_for_memory,
    find_error,
    never_repeated,
    was_lost,
)
from dpray.workers.engine import WorkerError
from dpray.workers.group_actor import Answer, GroupActor, GroupWorker, Outcome

TICK = 1.0
"""Seconds after which the pool says that nothing has come."""


class GroupPool:
    """A `GroupPool` has `runtime.actors` actors, each with a worker that `make_worker` makes, and
    hands them slices of blocks in which every group is whole. An actor's worker gets the groups of
    its slices about `task_size` at a time, each named in the column `key`.

    The pool does not wait for an actor that the cluster has no room for. An actor that is lost, or
    whose engine fails, is replaced, unless `runtime.max_attempts` in its place were lost without an
    answer. The groups without an outcome that it leaves go to the next actor that has room, unless
    as many actors were lost with them, or `privacy.lost_batches` is "drop".
    """

    def __init__(
        self, config: Config, make_worker: Callable[[], GroupWorker], key: str, task_size: int
    ) -> None:
        runtime = config.runtime
        self._actors = max(runtime.actors, runtime.min_actors)
        self._max_losses = runtime.max_attempts
        self._repeats = config.privacy.lost_batches == "repeat"
        self._key = key
        actor = never_repeated(GroupActor, config, runtime.gpus_per_actor or 0.0)
        # Sent once, however many actors there are: it may hold a whole plan.
        shared = ray.put(make_worker)
        self._make = lambda: actor.remote(shared, key, task_size)
        self._places: list[_Place] = []
        self._error: Exception | None = None

    def work(self, blocks: list[Any], slices: int = 1) -> Generator[list[Outcome]]:
        """Yield outcomes, in whichever order they come, and an empty list at least every `TICK`.
        Each block is cut in so many slices. Takes the references out of `blocks`, so that Ray frees
        those that are done.

        Raises the error that ended a task, and at the end the one with which a block was lost, or
        groups that no other actor may take: `LostTooOften` for those that would be repeated once
        more. Running out of memory is raised at once, as `EndedForMemory`, and so is the reason why
        a worker cannot be made in the first place (InputError or EngineError).
        """
        self._slices = _Slices(blocks, slices)
        number = min(self._actors, len(blocks) * slices)
        self._places = [_Place(self._make, self._key) for _ in range(number)]
        self._error = None
        came: list[Outcome] = []
        try:
            # Handed out first: no actor waits for what is done with the outcomes.
            while self._hand_out():
                yield came
                came = []
                if (place := self._next_ready()) is not None:
                    try:
                        came = place.take()
                    except (RayError, EngineError) as error:
                        self._go_on(place, error)
                    self._leave_out(place)
            yield came
            if self._error is not None:
                raise self._error
        finally:
            for place in self._places:
                place.end()

    def _hand_out(self) -> bool:
        """Give a slice to every actor that waits for one. Where there are no more, let the actors'
        engines run empty, and end the actors that have nothing under way: the cluster may need
        their machines. Return whether there is anything to wait for."""
        for place in list(self._places):
            if place.is_ready and self._slices:
                place.hand(self._slices.take(place.block))
            elif place.is_ready and place.is_busy:
                place.finish()
            elif not self._slices and not place.is_busy:
                self._end(place)
        return bool(self._slices) or any(place.is_busy for place in self._places)

    def _end(self, place: _Place) -> None:
        place.end()
        self._places.remove(place)

    def _next_ready(self) -> _Place | None:
        """Return a place whose actor has answered or is lost, the one that waited longest first;
        None where there is none for `TICK`."""
        waiting = {place.call: place for place in self._places}
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=TICK, fetch_local=False)
        if not ready:
            return None
        place = waiting[ready[0]]
        self._places.remove(place)
        self._places.append(place)
        return place

    def _go_on(self, place: _Place, error: Exception) -> None:
        """Put the groups that a lost actor leaves back, and start another one in its place, or give
        the place up where that happened too often. Raises what is no loss, and the error where no
        place is left."""
        if ended_for_memory(error):
            raise EndedForMemory(frozenset(p.attempt_id for p in self._places)) from error
        if not (was_lost(error) or place.engine_failed(error)):
            raise error
        for lost in place.slices:
            lost.losses += 1
            if not self._repeats:
                self._error = self._error or error
            elif lost.losses < self._max_losses:
                self._slices.put_back(lost)
            else:
                self._error = LostTooOften(error)
        place.losses += 1
        if self._slices and place.losses < self._max_losses:
            place.start()
            return
        self._end(place)
        if self._slices and not self._places:
            raise self._error or error

    def _leave_out(self, place: _Place) -> None:
        """Leave out a block that was lost on its way to the actor, with all its slices that are not
        handed out yet."""
        if place.lost is not None:
            block, error = place.lost
            place.lost = None
            self._slices.leave_out(block)
            self._error = self._error or error


@dataclass(eq=False)
class _Slice:
    """A `_Slice` is one of `count` in a block, or what a lost actor left of it: the groups that are
    `left` without an outcome, which nobody knows before an actor has looked into the block."""

    block: Any
    number: int
    count: int
    left: set[str] | None = None
    losses: int = 0


class _Slices:
    """`_Slices` are the slices of all blocks that no actor has."""

    def __init__(self, blocks: list[Any], count: int) -> None:
        self._whole, self._count = blocks, count
        self._whole.reverse()
        self._begun: dict[Any, int] = {}
        self._back: list[_Slice] = []

    def __bool__(self) -> bool:
        return bool(self._back or self._whole or self._begun)

    def take(self, near: Any) -> _Slice:
        """Return what a lost actor left, or else a slice of the first of these that there is: the
        block `near`, which the actor's machine holds, one that nobody has begun, the one with most
        slices left."""
        if self._back:
            return self._back.pop()
        if near not in self._begun:
            if self._whole:
                near = self._whole.pop()
                self._begun[near] = self._count
            else:
                near = max(self._begun, key=lambda block: self._begun[block])
        self._begun[near] -= 1
        number = self._begun[near]
        if number == 0:
            self.leave_out(near)
        return _Slice(near, number, self._count)

    def put_back(self, lost: _Slice) -> None:
        self._back.append(lost)

    def leave_out(self, block: Any) -> None:
        self._begun.pop(block, None)


class _Place:
    """A `_Place` has one actor at a time, and the slices that this actor has and is not done with.
    It is ready when the actor waits for a slice, and busy while it has one."""

    def __init__(self, make: Callable[[], Any], key: str) -> None:
        self._make, self._key = make, key
        self._actor: Any = None
        self._was_made = False
        self.losses = 0
        self.lost: tuple[Any, Exception] | None = None
        self.start()

    def start(self) -> None:
        self.end()
        self._actor = self._make()
        # No slice waits for a machine.
        self.slices: list[_Slice] = []
        self._names: Any = None
        self.attempt_id = ""
        self.call: Any = self._actor.load.remote()

    @property
    def is_ready(self) -> bool:
        return self.call is None

    @property
    def is_busy(self) -> bool:
        return bool(self.slices)

    @property
    def block(self) -> Any:
        return self.slices[-1].block if self.slices else None

    def hand(self, taken: _Slice) -> None:
        self.slices.append(taken)
        self._names = self._actor.take.remote(taken.block, taken.number, taken.count, taken.left)
        self.call = self._actor.more.remote()

    def finish(self) -> None:
        self._actor.finish.remote()
        self.call = self._actor.more.remote()

    def take(self) -> list[Outcome]:
        """Return the next outcomes. Raises what ended the task or the actor, InputError or
        EngineError for a worker that cannot be made, and EngineError where an engine failed."""
        answer: Answer | WorkerError = ray.get(self.call)
        if isinstance(answer, WorkerError):
            raise answer.error()
        self._was_made, self.attempt_id = True, answer.attempt_id
        if self._names is not None:
            self._name_groups()
        if answer.outcomes:
            self.losses = 0
        for outcome in answer.outcomes:
            for each in self.slices:
                if each.left is not None:
                    each.left.discard(outcome[self._key])
        # One that ends early, because its mechanism failed, has said so in an outcome.
        self.slices = [] if answer.is_idle else [each for each in self.slices if each.left != set()]
        self.call = None if answer.is_ready else self._actor.more.remote()
        return answer.outcomes

    def _name_groups(self) -> None:
        """Note which groups the last slice has, or forget the slice where its block was lost."""
        names, self._names = self._names, None
        try:
            self.slices[-1].left = set(ray.get(names))
        except RayError as error:
            if not was_lost(error) or find_error(error, RayActorError) is not None:
                raise
            self.lost = self.slices.pop().block, error

    def engine_failed(self, error: Exception) -> bool:
        """Return whether this is the error of an engine in whose place one has run before: another
        machine's may run. One that cannot be loaded anywhere would fail everywhere."""
        return isinstance(error, EngineError) and self._was_made

    def end(self) -> None:
        if self._actor is not None:
            ray.kill(self._actor)
