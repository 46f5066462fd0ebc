"""A pool of Ray actors, each with a model, writes a run's texts in place of a single engine.

The prompts are public and the texts post-processing, so nothing here is a mechanism: prompts that
were lost with an actor are sent again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any

import ray
from ray.exceptions import RayError

from dpray.config.config import Config, EngineConfig
from dpray.engines.base import (
    Completion,
    EngineError,
    OnCompletion,
    Prompts,
    Samplings,
    TextGenerator,
)
from dpray.types import DprayError
from dpray.workers.cluster import never_repeated, uses_ray
from dpray.workers.engine import build_engine, with_absolute_model
from dpray.workers.placement import hide_other_gpus

CHUNK = 1024
"""An actor is given at most this many prompts at once: enough that vLLM, which decodes some
hundreds side by side, spends little of its time on the last few of them."""


def on_pool(config: Config) -> bool:
    """Return whether actors write this run's texts."""
    return uses_ray(config) and config.engine.is_local


class EnginePool:
    """An `EnginePool` is a `TextGenerator` whose prompts go to `runtime.actors` actors, each with
    `runtime.cpus_per_actor` CPUs and `runtime.gpus_per_actor` GPUs.

    They start with the first call and stay until `close`; the pool does not wait for an actor that
    the cluster has no room for. A lost actor is replaced and its unanswered prompts are sent again,
    until `runtime.max_attempts` actors in its place were lost without an answer. `build` makes the
    engines.
    """

    def __init__(
        self, config: Config, build: Callable[[EngineConfig], TextGenerator] = build_engine
    ) -> None:
        runtime = config.runtime
        self._most = max(runtime.actors, runtime.min_actors)
        self._max_losses = runtime.max_attempts
        self._build = partial(build, with_absolute_model(config.engine))
        self._actor = never_repeated(EngineActor, config, runtime.gpus_per_actor or 0.0)
        self._places: list[_Place] = []

    def generate(
        self, prompts: Prompts, samplings: Samplings, on_completion: OnCompletion | None = None
    ) -> list[Completion]:
        """Generate as `TextGenerator.generate` does. Raises what building or running an actor's
        engine raised, or EngineError where actors keep being lost; in both cases the other actors
        first finish the prompts they have."""
        waiting = deque(_chunks(len(prompts), self._most))
        while len(self._places) < min(self._most, len(waiting)):
            self._places.append(_Place(partial(self._actor.remote, self._build)))
        completions: dict[int, Completion] = {}
        failure: Exception | None = None
        try:
            while waiting or any(place.unanswered for place in self._places):
                for place in self._places:
                    if place.is_idle and waiting:
                        place.hand(waiting.popleft(), prompts, samplings)
                place = self._next_ready()
                answers, error = place.take()
                for i, completion in answers:
                    completions[i] = completion
                    if on_completion is not None:
                        on_completion(i, completion)
                if isinstance(error, _ActorLost):
                    if place.unanswered:
                        # At the end: if these prompts end the next actor too, the others are done.
                        waiting.append(sorted(place.unanswered))
                    error = None if self._replaced(place) else error
                failure = failure or error
                if failure is not None:
                    waiting.clear()
            if failure is not None:
                raise failure
        except BaseException:
            self.close()
            raise
        return [completions[i] for i in range(len(prompts))]

    def _next_ready(self) -> _Place:
        """Wait for a place whose actor has answered or is lost."""
        busy = {place.reference: place for place in self._places if not place.is_idle}
        [ready], _ = ray.wait(list(busy), num_returns=1)
        return busy[ready]

    def _replaced(self, place: _Place) -> bool:
        """Start another actor in the place of a lost one, or give the place up where that happened
        too often; return False where no place is left."""
        if place.losses < self._max_losses:
            place.start()
        else:
            place.end()
            self._places.remove(place)
        return bool(self._places)

    def close(self) -> None:
        for place in self._places:
            place.end()
        self._places = []


class _ActorLost(EngineError):
    pass


class _Place:
    """A `_Place` has one actor at a time, and knows which prompts it has not answered yet."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self.losses = 0
        self.start()

    def start(self) -> None:
        if self.losses:
            self.end()
        self._actor = self._make()
        # The first call builds the engine and has no prompts: none wait for a machine.
        self.hand([], [], [])

    def hand(self, positions: list[int], prompts: Prompts, samplings: Samplings) -> None:
        self._positions, self.unanswered = positions, set(positions)
        self.is_idle = False
        self.reference = self._actor.generate.remote(
            [prompts[i] for i in positions], [samplings[i] for i in positions]
        )

    def take(self) -> tuple[list[tuple[int, Completion]], Exception | None]:
        """Return the positions and completions that have arrived, and the error that ended them:
        the engine's, or `_ActorLost`."""
        try:
            *answers, last = ray.get(self.reference)
        except RayError as lost:
            self.losses += 1
            kind = type(lost).__name__
            return [], _ActorLost(f"engine actors were lost {self.losses} times ({kind})")
        self.is_idle = last is None or isinstance(last, Exception)
        if not self.is_idle:
            answers.append(last)
            self.reference = self._actor.more.remote()
        if answers:
            self.losses = 0
        completions = [(self._positions[number], completion) for number, completion in answers]
        self.unanswered -= {i for i, _ in completions}
        if not isinstance(last, Exception):
            return completions, None
        self.unanswered = set()
        return completions, last

    def end(self) -> None:
        ray.kill(self._actor)


class EngineActor:
    """An `EngineActor` delegates to its engine and knows nothing else."""

    def __init__(self, build: Callable[[], TextGenerator]) -> None:
        hide_other_gpus()
        self._build = build
        self._engine: TextGenerator | None = None
        # An engine is built and used in one thread: what libraries keep for each thread (the
        # device, the pool of OpenMP) stays the same.
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._answers: SimpleQueue[Any] = SimpleQueue()

    def generate(self, prompts: Prompts, samplings: Samplings) -> list[Any]:
        """Start on these prompts, and return the first answers (`more`)."""
        self._thread.submit(self._generate, prompts, samplings)
        return self.more()

    def more(self) -> list[Any]:
        """Wait for an answer and return all that have arrived: the prompts' numbers with their
        completions, and at the end None or the engine's error. The error is a value, because Ray
        would log a raised one, and count an actor whose model is missing as lost."""
        found = [self._answers.get()]
        while not self._answers.empty():
            found.append(self._answers.get())
        return found

    def _generate(self, prompts: Prompts, samplings: Samplings) -> None:
        end: Exception | None = None
        try:
            if self._engine is None:
                self._engine = self._build()
            if prompts:
                self._engine.generate(
                    prompts, samplings, lambda i, completion: self._answers.put((i, completion))
                )
        except (DprayError, EngineError) as error:
            end = error
        except Exception as error:  # its message may quote a prompt
            end = DprayError(f"an engine actor failed: {type(error).__name__}")
        self._answers.put(end)


def _chunks(number: int, actors: int) -> Iterator[list[int]]:
    """Cut the positions below `number` into runs of `CHUNK`, or shorter ones so that every actor
    gets one."""
    size = max(1, min(CHUNK, -(-number // actors)))
    for start in range(0, number, size):
        yield list(range(start, min(start + size, number)))
