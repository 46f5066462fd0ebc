"""Private prediction on Ray, as discrete events: a run with a thousand actors.

The processes are those of a run: one driver, which hands out slices of blocks, takes answers one
after the other and publishes parts; the accountant, whose writers share a transaction; and the
actors, each with an engine that decodes some batches side by side. An event is a task that begins,
an answer, a part or a loss. Tokens are no events: between two events an engine's time is computed
batch by batch.

Left out: the network and the object store (a block of 10^8 records is some 50 MB), memory, the time
in which Ray creates actors, losses while a model is loaded, and what ends an attempt early: places
that are given up because too many actors in a row were lost, batches that are lost too often.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Generator
from typing import Any

import numpy as np
import simpy
from simulation_values import SPENT, Costs, Engine, Found, Load, Machines

from dpray.config.sections import RuntimeConfig
from dpray.io.file_list import READERS
from dpray.methods.private_prediction.release import (
    BATCHES_PER_PART,
    SECONDS_PER_PART,
    task_size,
)
from dpray.workers.accountant import CONCURRENT_CALLS
from dpray.workers.groups import MOST_SLICES, block_count
from dpray.workers.pool import TICK

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
    """A `Place` has one actor at a time, as in `dpray.workers.pool`: `handed` is the event
    with which the actor is given a slice, at the time `handed_at`, and `left` are the batches that
    it was given and has not answered yet."""

    def __init__(self) -> None:
        self.process: simpy.Process | None = None
        self.handed: simpy.Event | None = None
        self.handed_at = 0.0
        self.is_ready = False
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
        self.calls = self.repeated = self.lost_actors = 0
        self.starting = 0
        self.queue: deque[tuple[int, simpy.Event]] = deque()
        self.called = self.env.event()
        self.answers: deque[tuple[Place, str, list[int]]] = deque()
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
        )

    # The run

    def _run(self) -> Events:
        costs, load = self.costs, self.load
        runtime = RuntimeConfig(actors=self.machines.actors)
        self.task = load.task or task_size(runtime, True, load.batches)
        tasks = -(-load.batches // self.task)
        blocks = load.blocks or block_count(tasks, runtime.actors, load.batches * load.rows)
        yield self.env.timeout(costs.start + costs.hash_byte * load.bytes / READERS)
        # The model is tried.
        yield self.env.timeout(self._start_seconds(1) + self.engine.load)
        yield self.env.timeout(gathering(costs, self.machines, load, blocks))
        began = self.env.now
        yield from self._drive(self._slices(blocks))
        self.decoding_wall = self.env.now - began
        yield self.env.timeout(costs.finish + costs.finish_batch * load.batches)

    def _slices(self, blocks: int) -> list[list[int]]:
        """Cut the blocks, each of which has the batches that a hash brings there, in slices."""
        waiting = np.arange(self.load.batches)
        self.rng.shuffle(waiting)
        places = np.sort(self.rng.integers(blocks, size=len(waiting)))
        cut = np.split(waiting, np.searchsorted(places, range(1, blocks)))
        slices = min(MOST_SLICES, max(1, round(self.load.batches / (blocks * self.task))))
        return [part.tolist() for block in cut for part in np.array_split(block, slices)]

    def _start_seconds(self, starting: int) -> float:
        """Return the seconds in which a process starts while so many do."""
        share = max(1.0, starting / self.machines.cores)
        return self.costs.actor_wait + self.costs.actor_cpu * share

    # The driver

    def _drive(self, slices: list[list[int]]) -> Events:
        places = [Place() for _ in range(min(self.machines.actors, len(slices)))]
        ready: list[Place] = []
        self.starting = len(places)
        for place in places:
            place.process = self.env.process(self._actor(place, 0.0))
        if self.machines.killed is not None:
            self.env.process(self._kill_one(places, self.machines.killed))
        finished: list[int] = []
        last = self.env.now
        while slices or any(place.left for place in places):
            self._hand_out(places, ready, slices)
            if not self.answers:
                self.woken = self.env.event()
                yield self.woken | self.env.timeout(TICK)
            if self.answers:
                place, what, batches = self.answers.popleft()
                yield from self._driven(self.costs.answer + self.costs.answer_place * len(places))
                finished += batches
                place.left.difference_update(batches)
                if what == "ready" and not place.is_ended:
                    place.is_ready = True
                    ready.append(place)
                elif what == "lost" and not place.is_ended:
                    self._replace(place, places, slices)
            is_late = self.env.now - last >= SECONDS_PER_PART
            if finished and (is_late or len(finished) >= BATCHES_PER_PART):
                part, finished, last = finished, [], self.env.now
                yield from self._publish(part)
        if finished:
            yield from self._publish(finished)
        for place in places:
            self._end(place)

    def _hand_out(self, places: list[Place], ready: list[Place], slices: list[list[int]]) -> None:
        """Give a slice to the actors that wait for one; where there are no more, tell them so, and
        end the actors that have nothing under way."""
        while ready:
            place = ready.pop()
            if place.is_ready and (slices or place.left):
                self._hand(place, slices.pop() if slices else [])
        if not slices:
            for place in [place for place in places if not place.left]:
                places.remove(place)
                self._end(place)

    def _hand(self, place: Place, batches: list[int]) -> None:
        assert place.handed is not None
        place.is_ready, place.handed_at = False, self.env.now
        place.left.update(batches)
        place.handed.succeed(batches)

    def _replace(self, place: Place, places: list[Place], slices: list[list[int]]) -> None:
        """Put back what a lost actor left, and start another one where there is work."""
        if place.left:
            slices.append(sorted(place.left))
        place.left.clear()
        place.is_ready = False
        if slices:
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
        self.answers.append((place, what, batches))
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
        """Start, after `delay` until there is a machine, and decode until the engine runs empty,
        again and again."""
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
            done: list[int] = []
            while True:
                self._ask(place, done, under_way)
                assert place.handed is not None
                batches = yield from self._await(place.handed)
                yield from self._spend("handing over", self.costs.block)
                done = yield from self._decode(place, batches, factor, under_way)
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
        busy = next((place for place in places if place.left), None)
        if busy is not None and busy.process is not None and busy.process.is_alive:
            busy.process.interrupt("lost")

    def _spend(self, what: str, seconds: float) -> Events:
        began = self.env.now
        try:
            yield self.env.timeout(seconds)
        finally:
            self.spent[what] += self.env.now - began

    def _await(self, handed: simpy.Event) -> Generator[simpy.Event, Any, list[int]]:
        began = self.env.now
        try:
            batches: list[int] = yield handed
            return batches
        finally:
            self.spent["handing over"] += self.env.now - began

    def _ask(self, place: Place, done: list[int], under_way: set[int]) -> None:
        """Answer with what is done, and ask for a slice."""
        place.handed = self.env.event()
        self._tell(place, "ready", done)
        under_way.difference_update(done)

    def _decode(
        self, place: Place, batches: list[int], factor: float, under_way: set[int]
    ) -> Generator[simpy.Event, Any, list[int]]:
        """Decode slice after slice as `LockstepRun` does: the next batch is taken when there is
        room, one waits for it, and the engine waits while its task begins in the ledger. The next
        slice is asked for when the last task of one is taken, and waited for when that has no batch
        left. Returns what is done and not answered when the engine runs empty."""
        engine = self.engine
        tasks = self._tasks(batches)
        goes_on = True
        running: list[tuple[int, int]] = []
        taken: deque[int] = deque()
        done: list[int] = []
        rows = now = 0
        seconds = 0.0
        while True:
            while True:
                if not taken and (tasks or goes_on):
                    yield from self._spend("decoding", seconds * factor)
                    seconds = 0.0
                if not taken and not tasks and goes_on:
                    assert place.handed is not None
                    batches = yield from self._await(place.handed)
                    tasks, goes_on = self._tasks(batches), bool(batches)
                    late = place.handed_at + self.costs.block - self.env.now
                    yield from self._spend("handing over", max(0.0, late))
                if not taken and tasks:
                    task = tasks.popleft()
                    if not tasks:
                        self._ask(place, done, under_way)
                        done = []
                    yield from self._begin(len(task))
                    under_way.update(task)
                    taken.extend(task)
                if not taken or (running and rows + self.rows[taken[0]] > engine.room):
                    break
                batch = taken.popleft()
                heapq.heappush(running, (now + self.steps[batch], batch))
                rows += self.rows[batch]
                seconds += (engine.prompt_row + self.costs.row) * self.rows[batch]
            if not running:
                yield from self._spend("decoding", seconds * factor)
                return done
            then, batch = heapq.heappop(running)
            seconds += (then - now) * (engine.step + engine.step_row * rows)
            now, rows = then, rows - self.rows[batch]
            done.append(batch)
            if len(done) >= self.task:
                yield from self._spend("decoding", seconds * factor)
                seconds = 0.0
                self._tell(place, "answer", done)
                under_way.difference_update(done)
                done = []

    def _tasks(self, batches: list[int]) -> deque[list[int]]:
        number = round(len(batches) / self.task) or min(1, len(batches))
        return (
            deque(task.tolist() for task in np.array_split(batches, number)) if number else deque()
        )

    def _begin(self, batches: int) -> Events:
        began = self.env.now
        try:
            yield from self._call(batches)
        finally:
            self.spent["ledger"] += self.env.now - began


def simulate(costs: Costs, engine: Engine, machines: Machines, load: Load, seed: int = 0) -> Found:
    return Simulation(costs, engine, machines, load, seed).run()
