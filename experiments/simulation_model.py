"""Private prediction on Ray, as discrete events: a run with a thousand actors.

The processes are those of a run: one driver, which hands out blocks, takes answers one after the
other and publishes parts; the accountant, whose writers share a transaction; and the actors, each
with an engine that decodes some batches side by side. An event is a task that begins, an answer, a
part or a loss. Tokens are no events: between two events an engine's time is computed batch by
batch.

Left out: the network and the object store (a block of 10^8 records is some 50 MB), memory, the time
in which Ray creates actors, losses while a model is loaded, and places that are given up because
too many actors in a row were lost.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import simpy
from simulation_values import SPENT, Costs, Engine, Found, Load, Machines

from dpray.config.sections import RuntimeConfig
from dpray.io.records import READERS
from dpray.methods.private_prediction.release import (
    BATCHES_PER_PART,
    SECONDS_PER_PART,
    task_size,
)
from dpray.runs.accountant import CONCURRENT_CALLS
from dpray.runs.group_pool import TICK
from dpray.runs.groups import block_count

Events = Generator[simpy.Event, Any, None]


def gathering(costs: Costs, machines: Machines, load: Load, blocks: int) -> float:
    """Return the seconds in which all rows are read and the batches gathered, few or many."""
    shared = (
        costs.gather_worker * machines.workers
        + costs.gather_row * load.batches * load.rows
        + costs.gather_block * blocks
    )
    return costs.gather + shared / machines.cores + costs.gather_pair * load.pieces * blocks


class Place:
    """A `Place` has one actor at a time, as in `dpray.runs.group_pool`."""

    def __init__(self) -> None:
        self.process: simpy.Process | None = None
        self.handed: simpy.Event | None = None
        self.is_busy = False
        self.is_ended = False
        self.left: set[int] = set()


class Simulation:
    """A `Simulation` is one run, from the command to the release."""

    def __init__(
        self, costs: Costs, engine: Engine, machines: Machines, load: Load, seed: int
    ) -> None:
        self.costs, self.engine, self.machines, self.load = costs, engine, machines, load
        self.env = simpy.Environment()
        self.rng = rng = np.random.default_rng(seed)
        texts = engine.lengths(rng, load.batches * engine.texts).reshape(load.batches, -1)
        self.steps = texts.sum(axis=1).tolist()
        self.rows = (1 + rng.poisson(load.rows, load.batches)).tolist()
        self.published = np.zeros(load.batches, dtype=bool)
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.driver_busy = self.accountant_busy = self.decoding_wall = 0.0
        self.calls = self.repeated = self.lost_actors = self.attempts = self.commands = 0
        self.starting = 0
        self.queue: deque[tuple[int, simpy.Event]] = deque()
        self.called = self.env.event()
        self.ready: deque[tuple[Place, str, list[int]]] = deque()
        self.woken = self.env.event()

    def run(self) -> Found:
        self.env.process(self._accountant())
        self.env.run(self.env.process(self._run()))
        step = self.engine.step / self.engine.room + self.engine.step_row
        rows, steps = np.array(self.rows), np.array(self.steps)
        return Found(
            wall=self.env.now,
            decoding_wall=self.decoding_wall,
            actors=self.machines.actors,
            useful=float((rows * (steps * step + self.engine.prompt_row)).sum()),
            spent={what: self.spent[what] for what in SPENT},
            driver=self.driver_busy,
            accountant=self.accountant_busy,
            calls=self.calls,
            repeated=self.repeated,
            lost_actors=self.lost_actors,
            attempts=self.attempts,
            commands=self.commands,
        )

    # The run: commands, and attempts in each

    def _run(self) -> Events:
        costs, load = self.costs, self.load
        while not self.published.all():
            self.commands += 1
            yield self.env.timeout(costs.start + costs.hash_byte * load.bytes / READERS)
            if self.commands == 1:  # the model is tried
                yield self.env.timeout(self._start_seconds(1) + self.engine.load)
            for _ in range(RuntimeConfig().max_attempts):
                if not self.published.all():
                    yield from self._attempt()
        yield self.env.timeout(costs.finish + costs.finish_batch * load.batches)

    def _attempt(self) -> Events:
        costs, load = self.costs, self.load
        self.attempts += 1
        waiting = np.flatnonzero(~self.published)
        runtime = RuntimeConfig(actors=self.machines.actors)
        self.task = load.task or task_size(runtime, True, len(waiting))
        tasks = -(-len(waiting) // self.task)
        number = block_count(tasks, self.machines.actors, len(waiting) * load.rows)
        if load.blocks is not None:
            number = min(tasks, load.blocks)
        yield self.env.timeout(
            costs.resume_batch * (load.batches - len(waiting))
            + gathering(costs, self.machines, load, number)
        )
        # A block has the batches that a hash brings there.
        self.rng.shuffle(waiting)
        places = np.sort(self.rng.integers(number, size=len(waiting)))
        cut = np.split(waiting, np.searchsorted(places, range(1, number)))
        blocks = [part for block in cut for part in np.array_split(block, load.slices)]
        began = self.env.now
        yield from self._drive([block.tolist() for block in blocks])
        self.decoding_wall += self.env.now - began

    def _start_seconds(self, starting: int) -> float:
        """Return the seconds in which a process starts while so many do."""
        share = max(1.0, starting / self.machines.cores)
        return self.costs.actor_wait + self.costs.actor_cpu * share

    # The driver

    def _drive(self, blocks: list[list[int]]) -> Events:
        self.ready.clear()
        places = [Place() for _ in range(min(self.machines.actors, len(blocks)))]
        idle: list[Place] = []
        self.starting = len(places)
        for place in places:
            place.process = self.env.process(self._actor(place, 0.0))
        if self.machines.killed is not None and self.attempts == 1:
            self.env.process(self._kill_one(places, self.machines.killed))
        finished: list[int] = []
        last = self.env.now
        while blocks or any(place.is_busy for place in places):
            self._hand_out(places, idle, blocks)
            if not self.ready:
                self.woken = self.env.event()
                yield self.woken | self.env.timeout(TICK)
            if self.ready:
                place, what, batches = self.ready.popleft()
                yield from self._driven(self.costs.answer + self.costs.answer_place * len(places))
                finished += batches
                if what == "end" and not place.is_ended:
                    place.is_busy = False
                    idle.append(place)
                elif what == "ask" and not place.is_ended:
                    self._hand(place, blocks.pop() if blocks else [])
                elif what == "lost" and not place.is_ended:
                    if self.load.requeued and place.left:
                        blocks.append(sorted(place.left))
                    place.left.clear()
                    self._replace(place, places, bool(blocks))
            is_late = self.env.now - last >= SECONDS_PER_PART
            if finished and (is_late or len(finished) >= BATCHES_PER_PART):
                part, finished, last = finished, [], self.env.now
                yield from self._publish(part)
        if finished:
            yield from self._publish(finished)
        for place in places:
            self._end(place)

    def _hand_out(self, places: list[Place], idle: list[Place], blocks: list[list[int]]) -> None:
        """Give blocks to idle actors; where there are no more, end the actors without one."""
        while blocks and idle:
            self._hand(idle.pop(), blocks.pop())
        if not blocks:
            idle.clear()
            for place in [place for place in places if not place.is_busy]:
                places.remove(place)
                self._end(place)

    @staticmethod
    def _hand(place: Place, block: list[int]) -> None:
        assert place.handed is not None
        place.is_busy = True
        place.left.update(block)
        place.handed.succeed(block)

    def _replace(self, place: Place, places: list[Place], goes_on: bool) -> None:
        place.is_busy = False
        if goes_on:
            self.starting += 1
            place.process = self.env.process(self._actor(place, self.machines.replace))
        else:
            places.remove(place)

    @staticmethod
    def _end(place: Place) -> None:
        place.is_ended = True
        if place.process is not None and place.process.is_alive:
            place.process.interrupt("ended")

    def _driven(self, seconds: float) -> Events:
        self.driver_busy += seconds
        yield self.env.timeout(seconds)

    def _publish(self, batches: list[int]) -> Events:
        yield from self._driven(self.costs.part + self.costs.part_batch * len(batches))
        began = self.env.now
        yield from self._call(len(batches))
        self.driver_busy += self.env.now - began
        assert not self.published[batches].any()
        self.published[batches] = True

    def _tell(self, place: Place, what: str, batches: list[int]) -> None:
        self.ready.append((place, what, batches))
        if not self.woken.triggered:
            self.woken.succeed()

    # The accountant

    def _call(self, batches: int) -> Events:
        yield self.env.timeout(self.costs.ray_call)
        done = self.env.event()
        self.queue.append((batches, done))
        if not self.called.triggered:
            self.called.succeed()
        yield done

    def _accountant(self) -> Events:
        costs, calls = self.costs, 0
        while True:
            if not self.queue:
                self.called, calls = self.env.event(), 0
                yield self.called
            # A thread for each call: those of the last transaction are only just done.
            most = max(1, CONCURRENT_CALLS - calls)
            written = [self.queue.popleft() for _ in range(min(most, len(self.queue)))]
            calls = len(written)
            seconds = costs.ledger_commit + costs.ledger_call * calls
            seconds += costs.ledger_batch * sum(batches for batches, _ in written)
            yield self.env.timeout(seconds)
            self.accountant_busy += seconds
            self.calls += calls
            for _, done in written:
                done.succeed()

    # Actors

    def _actor(self, place: Place, delay: float) -> Events:
        """Start, after `delay` until there is a machine, and decode one block after the other."""
        slow = self.rng.random() < self.machines.slow
        factor = self.machines.slow_factor if slow else 1.0
        under_way: set[int] = set()
        try:
            yield from self._spend("lost", delay)
            yield from self._spend("starting", self._start_seconds(self.starting))
            self.starting -= 1
            yield from self._spend("starting", self.engine.load)
            if self.machines.losses:
                self.env.process(self._lose(self.env.active_process))
            while True:
                place.handed = self.env.event()
                ended = self.env.now
                self._tell(place, "end", [])
                block = yield place.handed
                self.spent["handing over"] += self.env.now - ended
                yield from self._spend("handing over", self.costs.block)
                yield from self._decode(place, block, factor, under_way)
        except simpy.Interrupt as interrupt:
            if interrupt.cause == "ended":
                return
        self.lost_actors += 1
        self.repeated += len(under_way)
        self.env.process(self._notice(place))

    def _notice(self, place: Place) -> Events:
        yield from self._spend("lost", self.machines.notice)
        if not place.is_ended:
            self._tell(place, "lost", [])

    def _lose(self, actor: simpy.Process | None) -> Events:
        yield self.env.timeout(self.rng.exponential(3600 / self.machines.losses))
        if actor is not None and actor.is_alive:
            actor.interrupt("lost")

    def _kill_one(self, places: list[Place], after: float) -> Events:
        while not self.published.any():
            yield self.env.timeout(TICK / 10)
        yield self.env.timeout(after)
        busy = next((place for place in places if place.is_busy), None)
        if busy is not None and busy.process is not None and busy.process.is_alive:
            busy.process.interrupt("lost")

    def _spend(self, what: str, seconds: float) -> Events:
        began = self.env.now
        try:
            yield self.env.timeout(seconds)
        finally:
            self.spent[what] += self.env.now - began

    def _decode(self, place: Place, block: list[int], factor: float, under_way: set[int]) -> Events:
        """Decode a block as `LockstepRun` does: the next batch is taken when there is room, one
        waits for it, and the engine waits while its task begins in the ledger."""
        engine, tasks, ahead = self.engine, self._tasks(block), self.load.ahead
        running: list[tuple[int, int]] = []
        taken: deque[int] = deque()
        done: list[int] = []
        rows = now = 0
        seconds = 0.0
        while True:
            while True:
                if not taken and (task := next(tasks, [])):
                    yield from self._spend("decoding", seconds * factor)
                    seconds = 0.0
                    yield from self._begin(len(task))
                    under_way.update(task)
                    taken.extend(task)
                elif not taken and ahead:
                    yield from self._spend("decoding", seconds * factor)
                    seconds = 0.0
                    place.handed = self.env.event()
                    self._tell(place, "ask", [])
                    block = yield place.handed
                    tasks, ahead = self._tasks(block), bool(block)
                    continue
                if not taken or (running and rows + self.rows[taken[0]] > engine.room):
                    break
                batch = taken.popleft()
                heapq.heappush(running, (now + self.steps[batch], batch))
                rows += self.rows[batch]
                seconds += (engine.prompt_row + self.costs.row) * self.rows[batch]
            if not running:
                break
            then, batch = heapq.heappop(running)
            seconds += (then - now) * (engine.step + engine.step_row * rows)
            now, rows = then, rows - self.rows[batch]
            done.append(batch)
            if len(done) >= self.task or not (running or taken):
                yield from self._spend("decoding", seconds * factor)
                seconds = 0.0
                self._tell(place, "answer", done)
                under_way.difference_update(done)
                place.left.difference_update(done)
                done = []

    def _tasks(self, block: list[int]) -> Iterator[list[int]]:
        number = max(1, round(len(block) / self.task))
        return (task.tolist() for task in np.array_split(block, number))

    def _begin(self, batches: int) -> Events:
        began = self.env.now
        try:
            yield from self._call(batches)
        finally:
            self.spent["ledger"] += self.env.now - began


def simulate(costs: Costs, engine: Engine, machines: Machines, load: Load, seed: int = 0) -> Found:
    return Simulation(costs, engine, machines, load, seed).run()
