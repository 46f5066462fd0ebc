"""Ray actors, each with a model, write a run's texts in place of a single engine.

The prompts are public and the texts post-processing, so nothing here is a mechanism: prompts that
were lost with an actor are sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from typing import Any

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
from dpray.workers.cluster import never_repeated, uses_ray
from dpray.workers.engine import build_engine, with_absolute_model
from dpray.workers.pool import ActorPool, InTurn, RayActors, RepeatPublic, Work
from dpray.workers.pool_actor import Emit, Pieces, PoolActor, named_errors

CHUNK = 1024
"""An actor is given at most this many prompts at once: enough that vLLM, which decodes some
hundreds side by side, spends little of its time on the last few of them."""


def on_pool(config: Config) -> bool:
    """Return whether actors write this run's texts."""
    return uses_ray(config) and config.engine.is_local


class EnginePool:
    """A `TextGenerator` whose prompts go to `runtime.actors` actors, each with
    `runtime.cpus_per_actor` CPUs and `runtime.gpus_per_actor` GPUs.

    The actors start with the first call and stay until `close`. A lost actor is replaced and its
    unanswered prompts are sent again, until `runtime.max_attempts` actors in its place were lost
    without an answer. `build` makes the engines.
    """

    def __init__(
        self, config: Config, build: Callable[[EngineConfig], TextGenerator] = build_engine
    ) -> None:
        runtime = config.runtime
        self._size = max(runtime.actors, runtime.min_actors)
        self._policy = RepeatPublic(runtime.max_attempts)
        actor = never_repeated(EngineActor, config, runtime.gpus_per_actor or 0.0)
        make_worker = partial(EngineWorker, partial(build, with_absolute_model(config.engine)))
        # All results that are there: the actor waits for no others.
        actors = RayActors(actor, make_worker, CHUNK, 0.0)
        self._pool = ActorPool(actors, self._policy, self._size, keeps_actors=True)

    def generate(
        self, prompts: Prompts, samplings: Samplings, on_completion: OnCompletion | None = None
    ) -> list[Completion]:
        """Generate as `TextGenerator.generate` does. Raises what building or running an actor's
        engine raised, or EngineError if actors keep being lost; in both cases the other actors
        first finish the prompts they have."""
        chunks = [
            Work((chunk, [prompts[i] for i in chunk], [samplings[i] for i in chunk]), set(chunk))
            for chunk in _chunks(len(prompts), self._size)
        ]
        completions: dict[int, Completion] = {}
        try:
            with closing(self._pool.run(InTurn(chunks))) as results:
                for i, completion in chain.from_iterable(results):
                    completions[i] = completion
                    if on_completion is not None:
                        on_completion(i, completion)
        except RayError as lost:
            raise EngineError(
                f"engine actors were lost {self._policy.max_losses} times ({type(lost).__name__})"
            ) from None
        return [completions[i] for i in range(len(prompts))]

    def close(self) -> None:
        self._pool.close()


class EngineActor(PoolActor):
    """The actor of an `EnginePool`."""


class EngineWorker:
    """Has an engine write the texts of one chunk of prompts after the other."""

    attempt_id = ""

    def __init__(self, build: Callable[[], TextGenerator]) -> None:
        with named_errors("an engine actor"):
            self._engine = build()

    def accept(
        self,
        positions: Sequence[int],
        prompts: Prompts,
        samplings: Samplings,
        left: Collection[int],
    ) -> tuple[Collection[int], list[tuple[int, Any, Any]]]:
        chunk = [
            each for each in zip(positions, prompts, samplings, strict=True) if each[0] in left
        ]
        return left, chunk

    def work(self, pieces: Pieces, emit: Emit) -> None:
        for chunk in pieces:
            with named_errors("an engine actor"):
                self._generate(chunk, emit)
            pieces.ask()

    def _generate(self, chunk: list[tuple[int, Any, Any]], emit: Emit) -> None:
        prompts, samplings = [each[1] for each in chunk], [each[2] for each in chunk]
        self._engine.generate(prompts, samplings, lambda i, made: emit(chunk[i][0], made))


def _chunks(number: int, actors: int) -> Iterator[list[int]]:
    """Cut the positions below `number` into runs of `CHUNK`, or shorter ones so that every actor
    gets one."""
    size = max(1, min(CHUNK, -(-number // actors)))
    for start in range(0, number, size):
        yield list(range(start, min(start + size, number)))
