"""`RayMap` distributes the evaluation's work on chunks of the data over Ray actors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import ray

from dpray.types import DprayError
from dpray.workers.cluster import start_ray
from dpray.workers.pool import ActorPool, InTurn, RayActors, RepeatPublic, Work
from dpray.workers.pool_actor import Emit, Pieces, PoolActor, named_errors

MAX_LOSSES = 3
"""The map ends when this many actors in a row were lost without a result."""


class RayMap:
    """`map` over Ray actors, a `ChunkMap` of the evaluation.

    Actors live as long as one call, and each has the function, which is sent once. An actor gets
    its next chunk when it has finished one. What is lost with an actor goes to another one. Results
    come in the order of the chunks. Raises DprayError: the function's own, or one that names the
    class of the error that stopped it.
    """

    def __init__(self, address: str | None, actors: int, gpus_per_actor: float = 0.0) -> None:
        start_ray(address)
        self._size = actors
        self._class = ray.remote(EvaluationActor).options(
            num_cpus=1, num_gpus=gpus_per_actor or None, max_restarts=0, max_task_retries=0
        )

    def __call__(self, function: Callable[[Any], Any], chunks: Sequence[Any]) -> Iterator[Any]:
        actors = RayActors(self._class, ray.put(partial(ChunkWorker, function)), 1)
        pool = ActorPool(actors, RepeatPublic(MAX_LOSSES), self._size)
        work = [Work((number, chunk), {number}) for number, chunk in enumerate(chunks)]
        found: dict[Any, Any] = {}
        due = 0
        try:
            with closing(pool.run(InTurn(work))) as lots:
                for results in lots:
                    found.update(results)
                    while due in found:
                        yield found.pop(due)
                        due += 1
        except ray.exceptions.RayError as error:
            raise DprayError(f"the evaluation's actors stopped: {type(error).__name__}") from None


class EvaluationActor(PoolActor):
    """The actor of a `RayMap`."""


class ChunkWorker:
    """Applies one function to the chunks that it is given."""

    attempt_id = ""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def accept(
        self, number: int, chunk: Any, left: Collection[int]
    ) -> tuple[Collection[int], tuple[int, Any]]:
        return left, (number, chunk)

    def work(self, pieces: Pieces, emit: Emit) -> None:
        for number, chunk in pieces:
            with named_errors("an actor of the evaluation"):
                emit(number, self._function(chunk))
            pieces.ask()
