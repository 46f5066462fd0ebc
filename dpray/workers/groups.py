"""Private rows are gathered by group, each group whole in one worker: in this process or on Ray.

Ray may repeat the reading as often as it likes: it draws nothing at random. It repeats nothing of
what the workers do; `dpray.workers.group_pool` says what goes to another one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import pyarrow as pa
import ray

from dpray.config.config import Config
from dpray.workers.cluster import own_errors, uses_ray
from dpray.workers.group_actor import OUTCOME_SECONDS, GroupWorker, Outcome
from dpray.workers.group_pool import GroupPool
from dpray.workers.rows import CHUNK, Row, RowsOf, local_rows, ray_rows
from dpray.workers.together import together

if TYPE_CHECKING:
    import ray.data

MOST_BLOCKS = 2048
BLOCKS_PER_ACTOR = 8
ROWS_PER_BLOCK = 32_768


@dataclass(frozen=True)
class Groups:
    """`Groups` describe the groups of a run's rows: `joined` names those that a row of `schema` is
    in, and `placeholder` is a row that every group has whatever the data holds, so that an empty
    group exists too. A worker finds the name of a row's group in the row's column `key`.
    `expected_rows` is a public number of rows a group."""

    rows_of: RowsOf
    schema: pa.Schema
    key: str
    joined: Callable[[Row], Iterable[str]]
    placeholder: Row
    expected_rows: int

    def work(
        self,
        config: Config,
        wanted: Sequence[str],
        make_worker: Callable[[], GroupWorker],
        task_size: int,
    ) -> Generator[list[Outcome]]:
        """Yield the outcomes of the wanted groups, about `task_size` at a time; also an empty list
        once the rows are gathered, and on Ray one a second where nothing comes. A worker is handed
        about `task_size` groups at a time, and takes the next ones before the last of these are
        done. On Ray what is lost with a worker goes to another one (`dpray.workers.group_pool`).

        On Ray the driver holds one task's outcomes and the groups' names; in one process, all rows.
        Raises the error that ended the execution: a DprayError of a task as itself, InputError or
        EngineError for a worker that an actor cannot make, anything else as Ray's error; where
        groups were lost that no other actor may take, when all others are done.
        """
        if uses_ray(config):
            with own_errors():
                # Before the actors start, which may take every CPU there is.
                blocks = self.gathered(config, wanted, task_size).to_arrow_refs()
                yield []
                slices = max(1, round(len(wanted) / (len(blocks) * task_size)))
                yield from GroupPool(config, make_worker, self.key, task_size).work(blocks, slices)
            return
        members = self._members_here(config, wanted)

        def tasks() -> Iterator[list[Row]]:
            waiting = iter(wanted)
            while task := list(islice(waiting, task_size)):
                yield [row | {self.key: group} for group in task for row in members.pop(group)]

        yield []
        worker = make_worker()
        try:
            with closing(worker.work(tasks())) as outcomes:
                lots = ([outcome] for outcome in outcomes)
                yield from together(lots, task_size, OUTCOME_SECONDS)
        finally:
            worker.close()

    def _members_here(self, config: Config, wanted: Sequence[str]) -> dict[str, list[Row]]:
        """Return the rows of each wanted group, its placeholder first."""
        members: dict[str, list[Row]] = {group: [self.placeholder] for group in wanted}
        for row in local_rows(config.data, self.rows_of):
            for group in self.joined(row):
                if group in members:
                    members[group].append(row)
        return members

    def gathered(self, config: Config, wanted: Sequence[str], task_size: int) -> ray.data.Dataset:
        """Return the rows in `block_count` blocks that hold every wanted group whole, including its
        placeholder."""
        from ray.data import from_arrow  # late: a worker needs no Ray Data

        reference = ray.put(frozenset(wanted))
        rows = ray_rows(config, self.rows_of, self.schema).map_batches(
            lambda table: self._members(table, ray.get(reference)),
            batch_format="pyarrow",
            batch_size=None,
        )
        runtime = config.runtime
        number = block_count(
            tasks=-(-len(wanted) // task_size),
            actors=max(runtime.actors, runtime.min_actors),
            rows=len(wanted) * self.expected_rows,
        )
        placeholders = from_arrow(self._placeholders(wanted))
        return rows.union(placeholders).repartition(number, keys=[self.key])

    def _placeholders(self, wanted: Sequence[str]) -> pa.Table:
        columns = {
            field.name: pa.array([self.placeholder[field.name]] * len(wanted), field.type)
            for field in self.schema
        }
        return pa.table(columns | {self.key: pa.array(wanted, pa.string())})

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


def block_count(tasks: int, actors: int, rows: int) -> int:
    """Return the number of blocks that `rows` are gathered in.

    The driver's memory grows with every pair of a block that was read and one that is gathered
    (docs/benchmarks.md), so there are two thousand at most; enough that every actor has some of its
    own, and that a block is no burden to its machine; and never more than tasks.
    """
    return max(1, min(tasks, MOST_BLOCKS, max(BLOCKS_PER_ACTOR * actors, rows // ROWS_PER_BLOCK)))
