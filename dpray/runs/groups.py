"""Private rows are gathered by group, each group whole in one worker: in this process or on Ray.

Ray may repeat the reading as often as it likes: it draws nothing at random. The workers' actors
have `max_restarts=0` and `max_task_retries=0`: a lost one ends the execution, and the runner
decides what is run again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Protocol

import pyarrow as pa
import ray
import ray.data

from dpray.config.config import Config
from dpray.runs.cluster import find_error, uses_ray
from dpray.runs.engine import LoadError, try_to_load
from dpray.runs.placement import hide_other_gpus
from dpray.runs.rows import CHUNK, Row, RowsOf, local_rows, ray_rows
from dpray.types import DprayError

Outcome = dict[str, Any]
"""An `Outcome` holds plain JSON values; its reader knows which."""


class GroupWorker(Protocol):
    def work(self, rows: Iterable[Row]) -> Iterator[Outcome]:
        """Yield an outcome for each group. If `rows` hold any row of a group, they hold all of
        them."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Groups:
    """`Groups` describe the groups of a run's rows: `joined` names those that a row of `schema` is
    in, and `place` is a row that every group has whatever the data holds, so that an empty group
    exists too. A worker finds the name of a row's group in the row's column `key`."""

    rows_of: RowsOf
    schema: pa.Schema
    key: str
    joined: Callable[[Row], Iterable[str]]
    place: Row

    def work(
        self,
        config: Config,
        wanted: Sequence[str],
        make_worker: Callable[[], GroupWorker],
        task_size: int,
    ) -> Generator[list[Outcome]]:
        """Yield the outcomes of the wanted groups, `task_size` groups at a time.

        On Ray the driver holds one task's outcomes and the groups' names; in one process, all rows.
        Raises the error that ended the execution: a DprayError of a task as itself, InputError or
        EngineError for a worker that an actor cannot make, anything else as Ray's error.
        """
        works = self._work_on_ray if uses_ray(config) else self._work_here
        return works(config, wanted, make_worker, task_size)

    def _work_here(
        self,
        config: Config,
        wanted: Sequence[str],
        make_worker: Callable[[], GroupWorker],
        task_size: int,
    ) -> Generator[list[Outcome]]:
        members: dict[str, list[Row]] = {group: [self.place] for group in wanted}
        for row in local_rows(config.data, self.rows_of):
            for group in self.joined(row):
                if group in members:
                    members[group].append(row)
        worker = make_worker()
        try:
            waiting = iter(wanted)
            while task := list(islice(waiting, task_size)):
                yield list(
                    worker.work(
                        row | {self.key: group} for group in task for row in members.pop(group)
                    )
                )
        finally:
            worker.close()

    def _work_on_ray(
        self,
        config: Config,
        wanted: Sequence[str],
        make_worker: Callable[[], GroupWorker],
        task_size: int,
    ) -> Generator[list[Outcome]]:
        runtime = config.runtime
        outcomes = self.gathered(config, wanted, task_size).map_batches(
            GroupActor,
            batch_size=None,
            batch_format="pyarrow",
            fn_constructor_kwargs={"make_worker": make_worker},
            compute=ray.data.ActorPoolStrategy(
                min_size=runtime.min_actors, max_size=max(runtime.actors, runtime.min_actors)
            ),
            num_cpus=runtime.cpus_per_actor,
            num_gpus=runtime.gpus_per_actor or None,
            max_restarts=0,
            max_task_retries=0,
        )
        try:
            tables: Iterable[Any] = outcomes.iter_batches(
                batch_size=None, batch_format="pyarrow", prefetch_batches=0
            )
            for table in tables:
                found = [json.loads(outcome) for outcome in table.column("outcome").to_pylist()]
                yield [outcome for outcome in found if "unloaded" not in outcome]
                for outcome in found:
                    if "unloaded" in outcome:
                        raise LoadError(**outcome["unloaded"]).error()
        except Exception as error:
            if (ours := find_error(error, DprayError)) is not None:
                raise ours from None
            raise

    def gathered(self, config: Config, wanted: Sequence[str], task_size: int) -> ray.data.Dataset:
        """Return the rows in blocks that hold every wanted group whole, including its `place`, and
        `task_size` groups on average."""
        reference = ray.put(frozenset(wanted))
        rows = ray_rows(config, self.rows_of, self.schema).map_batches(
            lambda table: self._members(table, ray.get(reference)),
            batch_format="pyarrow",
            batch_size=None,
        )
        places = self._table([self.place | {self.key: group} for group in wanted])
        tasks = -(-len(wanted) // task_size)
        return rows.union(ray.data.from_arrow(places)).repartition(tasks, keys=[self.key])

    def _members(self, table: pa.Table, wanted: frozenset[str]) -> Iterator[pa.Table]:
        """Yield the rows of the wanted groups, a row as often as it is in one."""
        members = (
            row | {self.key: group}
            for row in table.to_pylist()
            for group in self.joined(row)
            if group in wanted
        )
        yield self._table([])  # the schema, where there is no member
        while chunk := list(islice(members, CHUNK)):
            yield self._table(chunk)

    def _table(self, rows: list[Row]) -> pa.Table:
        schema = self.schema.append(pa.field(self.key, pa.string()))
        return pa.Table.from_pylist(rows, schema=schema)


class GroupActor:
    """A `GroupActor` is an actor of the pool and delegates to its worker. Where the worker cannot
    be made, the actor answers with the reason, and begins no group."""

    def __init__(self, make_worker: Callable[[], GroupWorker]) -> None:
        hide_other_gpus()
        self.worker = try_to_load(make_worker)

    def __call__(self, table: pa.Table) -> Iterator[pa.Table]:
        if isinstance(self.worker, LoadError):
            yield pa.table({"outcome": [json.dumps({"unloaded": asdict(self.worker)})]})
            return
        for outcome in self.worker.work(table.to_pylist()):
            yield pa.table({"outcome": [json.dumps(outcome)]})
