"""A pool of Ray actors does work in parts; the controller is plain Python.

The actors have `max_restarts=0` and `max_task_retries=0`: Ray repeats nothing. One actor at a time
has a part. If that actor is lost, another one does the items of it that have no outcome, public and
private ones by one rule (`ends_run`). Later answers of a lost actor are ignored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

from dpray.types import Resumable
from dpray.workers.cluster import NeverRepeated
from dpray.workers.failures import REPEAT, Kind, LostTooOften, find_error, kind_of
from dpray.workers.placement import Place, run_placement
from dpray.workers.pool_actor import Answer, Result

TICK = 1.0
"""Seconds after which the pool yields an empty list if nothing has come."""


@dataclass(eq=False)
class Part:
    """A part of the work: the `arguments` of a worker's `accept`, and the names of the items
    that are `left` without an outcome. None: unknown until an actor has looked at the arguments."""

    arguments: tuple[object, ...]
    left: set[Hashable] | None = None
    losses: int = 0


# The controller

OnLoss = Callable[[str, Exception], None]
"""Is told of each actor whose work another one takes over: the worker's id, and the error."""


class RayActors:
    """The pool's only way to Ray: starts, calls, awaits and ends its actors, which `load` an engine
    and make a worker of these `arguments`. The first ones go into the run's `places`, and others
    where there is room. The very first one is that which has tried the engine, if it is `kept`."""

    def __init__(
        self,
        actor_class: NeverRepeated,
        load: Callable[[], Any],
        *arguments: object,
        places: Sequence[Place] = (),
        kept: ActorHandle[object] | None = None,
    ) -> None:
        self._class, self._load, self.arguments = actor_class, load, arguments
        self._places, self._kept = list(places), kept
        self._taken: dict[ActorHandle[object], Place] = {}

    def start(self) -> ActorHandle[object]:
        place = self._places.pop(0) if self._places else None
        kept, self._kept = self._kept, None
        actor: ActorHandle[object] = kept or self._class.remote(self._load, place=place)
        if place is not None:
            self._taken[actor] = place
        return actor

    def call(
        self, actor: ActorHandle[object], method: str, *arguments: object
    ) -> ray.ObjectRef[object]:
        call: ray.ObjectRef[object] = getattr(actor, method).remote(*arguments)
        return call

    def first_done(
        self, calls: list[ray.ObjectRef[object]], seconds: float
    ) -> ray.ObjectRef[object] | None:
        """Return the first of the calls that is done or lost; None if no call ends in time."""
        done, _ = ray.wait(calls, num_returns=1, timeout=seconds, fetch_local=False)
        return done[0] if done else None

    def result(self, call: ray.ObjectRef[object]) -> Any:
        return ray.get(call)

    def end(self, actor: ActorHandle[object]) -> None:
        ray.kill(actor)
        if (place := self._taken.pop(actor, None)) is not None:
            self._places.insert(0, place)

    def leave(self, actor: ActorHandle[object]) -> None:
        """End an actor that nothing replaces; the cluster may need its place."""
        place = self._taken.get(actor)
        self.end(actor)
        if place is not None and run_placement().leave(place):
            self._places.remove(place)


class SlotState(Enum):
    STARTING = auto()
    """The actor waits for a machine, or makes its worker. No work waits with it."""
    READY = auto()
    """The actor waits for work. Earlier work may still be under way."""
    WORKING = auto()
    DRAINING = auto()
    """The actor knows that there is no more work, and finishes what is under way."""


class _ActorSlot:
    """Has one actor at a time, and the work that this actor has and is not done with."""

    def __init__(self, actors: RayActors) -> None:
        self._actors = actors
        self._actor: Any = None
        self.has_run = False
        self.losses = 0
        self.start()

    def start(self) -> None:
        """Start an actor in place of the last one."""
        self.end()
        self._actor = self._actors.start()
        self.work: list[Part] = []
        self.undelivered: Exception | None = None
        self.call: Any = None
        self.worker_id = ""
        self._names: Any = None
        self._ask("load", SlotState.STARTING, *self._actors.arguments)

    def hand(self, part: Part) -> None:
        self.work.append(part)
        self._names = self._actors.call(self._actor, "take", *part.arguments, part.left)
        self._ask("more", SlotState.WORKING)

    def drain(self) -> None:
        self._actors.call(self._actor, "finish")
        self._ask("more", SlotState.DRAINING)

    def end(self) -> None:
        if self._actor is not None:
            self._actors.end(self._actor)

    def leave(self) -> None:
        self._actors.leave(self._actor)

    def next_outcomes(self) -> list[Result]:
        """Return the results of the call that is done. Raises what ended the call or the actor, and
        the worker's error."""
        answer: Answer = self._actors.result(self.call)
        if answer.error is not None:
            raise answer.error
        self.has_run, self.worker_id = True, answer.worker_id
        self._note_names()
        if answer.results:
            self.losses = 0
        for name, _ in answer.results:
            for each in self.work:
                if each.left is not None:
                    each.left.discard(name)
        # A worker that ends early, because its mechanism failed, has said so in an outcome.
        self.work = [] if answer.is_idle else [each for each in self.work if each.left != set()]
        if answer.is_ready:
            self.call, self.state = None, SlotState.READY
        else:
            self._ask("more", self.state)
        return answer.results

    def _ask(self, method: str, state: SlotState, *arguments: object) -> None:
        self.call = self._actors.call(self._actor, method, *arguments)
        self.state = state

    def _note_names(self) -> None:
        """Note which items the last part has, or forget it if its arguments were lost."""
        if self._names is None:
            return
        names, self._names = self._names, None
        try:
            self.work[-1].left = set(self._actors.result(names))
        except RayError as error:
            if kind_of(error) is not Kind.LOST or find_error(error, RayActorError) is not None:
                raise
            self.work.pop()
            self.undelivered = error


def ends_run(error: Exception, has_run: bool) -> bool:
    """Return whether an actor's error ends the run at once. Otherwise its reason is on the short
    list (`dpray.workers.failures.Kind`), and its work is repeated. `has_run`: an actor of the same
    slot had made its worker; an engine that cannot be loaded in the first place would fail
    everywhere."""
    kind = kind_of(error)
    lost = kind in (Kind.LOST, Kind.MEMORY)
    return not lost and not (has_run and kind.drawing is REPEAT)


class ActorPool:
    """The controller of at most `size` actors. A part that `max_losses` actors were lost with is
    left out, and a slot that lost as many in a row without an answer is given up.

    It waits for an actor that the cluster has no room for only if it has no other one, and for
    `wait` seconds at most. An actor that has no more work is ended, because the cluster may need
    its machine; with `keeps_actors` it stays for the next run, until `close`."""

    def __init__(
        self,
        actors: RayActors,
        max_losses: int,
        size: int,
        wait: float,
        keeps_actors: bool = False,
        on_loss: OnLoss = lambda worker_id, error: None,
    ) -> None:
        self._actors, self._max_losses, self._size, self._wait = actors, max_losses, size, wait
        self._keeps_actors, self._on_loss = keeps_actors, on_loss
        self._slots: list[_ActorSlot] = []

    def run(self, work: Iterable[Part]) -> Generator[list[Result]]:
        """Do all work, in turn. What a lost actor left comes last: if it ends the next actor too,
        all other work is done. Yield results, in whichever order they come, and an empty list at
        least every `TICK`: one step of the controller each time.

        Raises the error that ended the run, or Resumable without an actor for `wait` seconds; and
        at the end the error with which work was left out.
        """
        self._waiting = deque(work)
        self._waited = 0.0
        self._error: Exception | None = None
        while len(self._slots) < min(self._size, len(self._waiting)):
            self._slots.append(_ActorSlot(self._actors))
        results: list[Result] = []
        try:
            # Handed out first: no actor waits for what is done with the results.
            while self._hand_out():
                yield results
                results = self._next_results()
            yield results
            if self._error is not None:
                raise self._error
        except BaseException:
            self.close()
            raise
        if not self._keeps_actors:
            self.close()

    def close(self) -> None:
        """End all actors."""
        while self._slots:
            self._slots.pop().end()

    def _hand_out(self) -> bool:
        """Give work to every actor that waits for it. Without work, drain or end the actor.
        Return whether there is anything to wait for."""
        for slot in list(self._slots):
            if slot.state is SlotState.READY and self._waiting:
                slot.hand(self._waiting.popleft())
            elif slot.state is SlotState.READY and slot.work:
                slot.drain()
            elif not (self._waiting or slot.work or self._keeps_actors):
                self._end(slot)
        return bool(self._waiting) or any(slot.work for slot in self._slots)

    def _next_results(self) -> list[Result]:
        """Wait for one slot, and return its results."""
        slot = self._next_slot()
        if slot is None:
            return []
        try:
            results = slot.next_outcomes()
        except Exception as error:
            self._lose(slot, error)
            return []
        self._error, slot.undelivered = self._error or slot.undelivered, None
        return results

    def _next_slot(self) -> _ActorSlot | None:
        """Return a slot whose actor has answered or is lost, the one that waited longest first;
        None if no actor answers within `TICK`."""
        asked = {slot.call: slot for slot in self._slots if slot.call is not None}
        done = self._actors.first_done(list(asked), TICK)
        is_starting = all(slot.state is SlotState.STARTING for slot in self._slots)
        self._waited = self._waited + TICK if is_starting and done is None else 0.0
        if self._waited > self._wait:
            raise Resumable(
                f"the cluster has no room: the run waited for an actor for {self._wait:g} s "
                "(runtime.wait); make room, or wait longer"
            )
        if done is None:
            return None
        slot = asked[done]
        self._slots.remove(slot)
        self._slots.append(slot)
        return slot

    def _lose(self, slot: _ActorSlot, error: Exception) -> None:
        """Have others do the work of a slot whose actor has failed. Raises the error if it ends the
        run, or if no slot is left."""
        if ends_run(error, slot.has_run):
            raise error
        self._on_loss(slot.worker_id, error)
        for part in slot.work:
            part.losses += 1
            if part.losses < self._max_losses:
                self._waiting.append(part)
            else:
                self._error = LostTooOften(error)
        slot.losses += 1
        if self._waiting and slot.losses < self._max_losses:
            slot.start()
            return
        self._end(slot)
        if self._waiting and not self._slots:
            raise self._error or error

    def _end(self, slot: _ActorSlot) -> None:
        slot.leave()
        self._slots.remove(slot)
