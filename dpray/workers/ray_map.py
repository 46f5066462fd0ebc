"""`RayMap` distributes the evaluation's work on chunks of the data over Ray actors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray

from dpray.types import DprayError
from dpray.workers.cluster import start_ray

RESTARTS = 2
"""An actor is restarted, and a chunk that was lost with its actor is repeated, this many times."""


class RayMap:
    """A `RayMap` is `map` over Ray actors, a `ChunkMap` of the evaluation.

    Actors live as long as one call, and each holds the function, which is sent once. An actor gets
    its next chunk when it has finished one; the map does not wait for actors that the cluster has
    no room for. A lost actor is restarted and its chunk repeated, `RESTARTS` times. Results come in
    the order of the chunks. Raises DprayError: the function's own, or one that names the class of
    the error that stopped it.
    """

    def __init__(self, address: str | None, actors: int, gpus_per_actor: float = 0.0) -> None:
        start_ray(address)
        self._actors = actors
        self._make: Any = ray.remote(EvaluationActor).options(
            num_cpus=1,
            num_gpus=gpus_per_actor or None,
            max_restarts=RESTARTS,
            max_task_retries=RESTARTS,
        )

    def __call__(self, function: Callable[[Any], Any], chunks: Sequence[Any]) -> Iterator[Any]:
        shared = ray.put(function)
        actors = [self._make.remote() for _ in range(min(self._actors, len(chunks)))]
        try:
            yield from _in_order(actors, shared, deque(chunks))
        except ray.exceptions.RayError as error:
            raise DprayError(f"the evaluation's actors stopped: {type(error).__name__}") from None
        finally:
            for actor in actors:
                ray.kill(actor)


class EvaluationActor:
    """An `EvaluationActor` is an actor that applies one function, which it keeps."""

    _function: Callable[[Any], Any] | None = None

    def call(self, shared: list[Any], chunk: Any) -> Any:
        """Return the function's result, or a DprayError as a value: Ray logs errors that are
        raised, and a foreign one could quote a text."""
        try:
            if self._function is None:
                self._function = ray.get(shared[0])
            return self._function(chunk)
        except DprayError as error:
            return error
        except Exception as error:
            return DprayError(f"an actor of the evaluation failed: {type(error).__name__}")


def _in_order(actors: Sequence[Any], function: Any, waiting: deque[Any]) -> Iterator[Any]:
    busy = {actor.__ray_ready__.remote(): actor for actor in actors}
    answers: deque[Any] = deque()
    while waiting or answers:
        (done,), _ = ray.wait(list(busy), num_returns=1)
        actor = busy.pop(done)
        if waiting:
            # Ray passes a reference inside a list unresolved, so that each actor resolves it once.
            answers.append(actor.call.remote([function], waiting.popleft()))
            busy[answers[-1]] = actor
        while answers and answers[0] not in busy:
            answer = ray.get(answers.popleft())
            if isinstance(answer, DprayError):
                raise answer
            yield answer
