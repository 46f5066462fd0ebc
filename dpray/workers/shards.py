"""The private records are held by workers: one in this process, or actors on Ray.

A worker's answers are exact and hold no noise: the caller adds up the answers of all workers and
adds the noise once. So a lost worker may be rebuilt as often as needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import pyarrow as pa
import ray

from dpray.config.config import Config
from dpray.workers.cluster import never_repeated, own_errors, uses_ray
from dpray.workers.engine import WorkerError, try_to_load
from dpray.workers.placement import hide_other_gpus
from dpray.workers.rows import CHUNK, Row, local_rows, ray_rows, record_rows

ROWS = pa.schema(
    [("text", pa.string()), ("label", pa.string()), ("unit", pa.string()), ("rank", pa.int64())]
)


class Worker(Protocol):
    def load(self, rows: Sequence[Row]) -> None:
        """Take some of this worker's records."""
        ...


class Shards:
    """`Shards` are workers, `make_worker(config)` for each shard, that each hold a part of the
    records. On Ray a shard is an actor of `runtime.cpus_per_actor` CPUs and `gpus` GPUs.

    Raises InputError for bad rows, Ray's error where an actor is lost, InputError or EngineError
    for a worker that cannot be made.
    """

    def __init__(
        self, config: Config, make_worker: Callable[[Config], Worker], gpus: float = 0.0
    ) -> None:
        self._actors: list[Any] = []
        self._local: Any = None
        if uses_ray(config):
            blocks = _blocks_on_ray(config)
            actor = never_repeated(ShardActor, config, gpus)
            # As many as configured, even where some get no block: the batches of public work may
            # not depend on how many records there are.
            self._actors = [actor.remote(config, make_worker) for _ in range(config.runtime.actors)]
            _get(
                [
                    self._actors[number % len(self._actors)].load.remote(block)
                    for number, block in enumerate(blocks)
                ]
            )
        else:
            self._local = make_worker(config)
            rows = local_rows(config.data, partial(record_rows, data=config.data))
            for start in range(0, len(rows), CHUNK):
                self._local.load(rows[start : start + CHUNK])

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Return each worker's answer to the same arguments, in the order of the shards."""
        if self._local is not None:
            return [getattr(self._local, method)(*arguments)]
        shared = [ray.put(argument) for argument in arguments]
        return _get([actor.call.remote(method, *shared) for actor in self._actors])

    def scatter(self, method: str, items: Sequence[Any]) -> list[Any]:
        """Apply the workers' method to slices of `items`, and return the answers in order: public
        work is distributed over the same actors."""
        if self._local is not None:
            return [getattr(self._local, method)(items)]
        size = -(-len(items) // len(self._actors)) or 1
        slices = [items[start : start + size] for start in range(0, len(items), size)]
        calls = [
            actor.call.remote(method, part)
            for actor, part in zip(self._actors, slices, strict=False)
        ]
        return _get(calls)

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._actors, self._local = [], None


class ShardActor:
    """A `ShardActor` delegates to its worker. Where the worker cannot be made, it answers every
    call with the reason."""

    def __init__(self, config: Config, make_worker: Callable[[Config], Worker]) -> None:
        hide_other_gpus()
        self.worker: Any = try_to_load(lambda: make_worker(config))

    def load(self, table: pa.Table) -> WorkerError | None:
        if isinstance(self.worker, WorkerError):
            return self.worker
        self.worker.load(table.to_pylist())
        return None

    def call(self, method: str, *arguments: Any) -> Any:
        if isinstance(self.worker, WorkerError):
            return self.worker
        return getattr(self.worker, method)(*arguments)


def _blocks_on_ray(config: Config) -> list[Any]:
    """Return references to blocks of rows. All of them are read before the actors start, which may
    take every CPU there is."""
    with own_errors():
        rows = ray_rows(config, partial(record_rows, data=config.data), ROWS)
        if config.runtime.actors > 1:
            rows = rows.repartition(target_num_rows_per_block=CHUNK)
        return rows.to_arrow_refs()


def _get(references: list[Any]) -> list[Any]:
    """Return the answers. Raises dpray's own errors as themselves, and InputError or EngineError
    for a worker that an actor could not make."""
    with own_errors():
        answers = list(ray.get(references))
    for answer in answers:
        if isinstance(answer, WorkerError):
            raise answer.error()
    return answers
