"""Evaluation's work on slices of the data, spread over actors of Ray."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import ray

from dpray.engines.base import Embedder
from dpray.runs.cluster import start_ray
from dpray.types import DprayError

RESTARTS = 2
"""Of each actor, and of a slice that an actor was lost with."""


class RayMap:
    """`map` over actors of Ray, so a `Spread` of the evaluation.

    Actors live as long as one call, and each holds the function, which is sent once. An actor gets
    its next slice when it is done with one; those for which the cluster has no room are not waited
    for. A lost actor is started anew and its slice repeated, `RESTARTS` times. Answers come in the
    order of the slices. Raises DprayError: the function's own, or one that names the kind of
    what stopped it.
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

    def __call__(self, function: Callable[[Any], Any], slices: Sequence[Any]) -> Iterator[Any]:
        shared = ray.put(function)
        actors = [self._make.remote() for _ in range(min(self._actors, len(slices)))]
        try:
            yield from _in_order(actors, shared, deque(slices))
        except ray.exceptions.RayError as error:
            raise DprayError(f"the evaluation's actors stopped: {type(error).__name__}") from None
        finally:
            for actor in actors:
                ray.kill(actor)


class EvaluationActor:
    """The actor: all it knows is one function."""

    _function: Callable[[Any], Any] | None = None

    def call(self, shared: list[Any], part: Any) -> Any:
        """The function's answer, or a DprayError for what it raised: as a value, because Ray logs
        those it raises itself, and a foreign one could quote a text."""
        try:
            if self._function is None:
                self._function = ray.get(shared[0])
            return self._function(part)
        except DprayError as error:
            return error
        except Exception as error:
            return DprayError(f"an actor of the evaluation failed: {type(error).__name__}")


class LateEmbedder:
    """An `Embedder` that travels as `load` and loads its model where it is first used."""

    def __init__(self, load: Callable[[], Embedder]) -> None:
        self._load = load

    @cached_property
    def _model(self) -> Embedder:
        return self._load()

    def embed(self, texts: Sequence[str]) -> Any:
        return self._model.embed(texts)


def _in_order(actors: Sequence[Any], function: Any, waiting: deque[Any]) -> Iterator[Any]:
    busy = {actor.__ray_ready__.remote(): actor for actor in actors}
    answers: deque[Any] = deque()
    while waiting or answers:
        (done,), _ = ray.wait(list(busy), num_returns=1)
        actor = busy.pop(done)
        if waiting:
            # In a list the reference stays one, which each actor resolves once.
            answers.append(actor.call.remote([function], waiting.popleft()))
            busy[answers[-1]] = actor
        while answers and answers[0] not in busy:
            answer = ray.get(answers.popleft())
            if isinstance(answer, DprayError):
                raise answer
            yield answer
