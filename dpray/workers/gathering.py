"""Private rows are gathered by batch, each batch whole in one worker: in this process or on Ray.

Ray may repeat the reading, which draws nothing at random. It repeats nothing of what the workers
do. On Ray a pool's actors take parts of the gathered blocks; what is lost with an actor goes to
another one, as `pool.ends_run` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from time import monotonic
from typing import TYPE_CHECKING, Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import ray

from dpray.config.config import Config
from dpray.engines.base import Engine
from dpray.mechanisms.batches import HashPartition, PoissonBatches
from dpray.types import Json, in_parts
from dpray.workers.engine_pool import engine_actors
from dpray.workers.failures import own_errors
from dpray.workers.memory import BLOCK_ROWS
from dpray.workers.placement import run_placement
from dpray.workers.pool import ActorPool, OnLoss, Part
from dpray.workers.pool_actor import Emit, Parts
from dpray.workers.rows import (
    Row,
    RowsOf,
    check_cut_files,
    data_files,
    local_rows,
    ray_rows,
    record_rows,
    tables_of,
)

if TYPE_CHECKING:
    import ray.data

MOST_BLOCKS = 2048
BLOCKS_PER_ACTOR = 8
MOST_PARTS = 8
"""A block is cut in at most this many parts, because every actor that takes one gets the block."""

KEY = "batch"
"""The column of the rows, and the key of an outcome, that names the batch."""

MEMBERS = pa.schema([("text", pa.string()), ("unit", pa.string()), (KEY, pa.string())])
"""A unit is needed only where the copies of a text are bounded, which those in disjoint batches
are."""

PLACEHOLDER: Row = {"text": None, "unit": ""}
"""Every batch has this row once. So a batch without private rows exists too."""

T = TypeVar("T")

Outcome = Json
"""Plain JSON values; one of them is the batch's name, under `KEY`."""


class BatchWorker(Protocol):
    worker_id: str
    """The ledger records under this id which batches the worker has begun."""

    def work(self, tasks: Iterable[list[Row]]) -> Generator[Outcome]:
        """Yield an outcome for each batch. If a task holds any row of a batch, it holds all of
        them. The next task is taken when there is room for it. Raises EngineError if the engine
        failed, after which the worker is not asked again."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class BatchGathering:
    """Brings the rows of each batch together. `secret` is the key of Poisson batches, "" for
    disjoint ones. `expected_rows` is the public number of rows expected in a batch.

    On Ray this process holds the names of the batches; without Ray it holds all rows. Raises
    dpray's own errors as a task raised them, Ray's otherwise.
    """

    batches: HashPartition | PoissonBatches
    secret: str = field(repr=False)
    expected_rows: int

    def joined(self, row: Row) -> Iterator[str]:
        """Yield the batches that a row's unit joins."""
        if isinstance(self.batches, HashPartition):
            return self.batches.joined(row["label"], row["unit"])
        return self.batches.joined(self.secret, row["label"], row["unit"])

    def rows_of(self, config: Config) -> RowsOf:
        """Return the reader of the rows. The coins of Poisson batches go by a record's place."""
        by_place = isinstance(self.batches, PoissonBatches)
        return partial(record_rows, data=config.data, by_place=by_place)

    def here(self, config: Config, wanted: Sequence[str]) -> dict[str, list[Row]]:
        """Return the rows of each wanted batch, its placeholder first."""
        members: dict[str, list[Row]] = {batch: [PLACEHOLDER] for batch in wanted}
        for row in local_rows(config.data, self.rows_of(config)):
            for batch in self.joined(row):
                if batch in members:
                    members[batch].append(row)
        return members

    def on_ray(self, config: Config, wanted: Sequence[str], task_size: int) -> Iterator[Part]:
        """Return the parts of the work for a pool, each with whole batches. To be called before its
        actors start, which may take every CPU there is."""
        with own_errors():
            run_placement().make_room()
            blocks = self.gathered(config, wanted, task_size).to_arrow_refs()
            check_cut_files(data_files(config.data))
        return cut_blocks(blocks, round(len(wanted) / (len(blocks) * task_size)))

    def gathered(self, config: Config, wanted: Sequence[str], task_size: int) -> ray.data.Dataset:
        """Return the rows in `block_count` blocks that hold every wanted batch whole, including its
        placeholder."""
        reference = ray.put(frozenset(wanted))
        rows = ray_rows(
            config,
            self.rows_of(config),
            lambda rows: self._tables(rows, ray.get(reference)),
        )
        runtime = config.runtime
        number = block_count(
            tasks=-(-len(wanted) // task_size),
            actors=runtime.actors,
            rows=len(wanted) * self.expected_rows,
        )
        placeholders = pa.Table.from_pylist(
            [PLACEHOLDER | {KEY: batch} for batch in wanted], schema=MEMBERS
        )
        return rows.union(ray.data.from_arrow(placeholders)).repartition(number, keys=[KEY])

    def _tables(self, rows: Iterable[Row], wanted: frozenset[str]) -> Iterator[pa.Table]:
        """Return tables of the wanted batches' rows, which have a row as often as it is in one."""
        return tables_of(chain.from_iterable(map(partial(self._members, wanted), rows)), MEMBERS)

    def _members(self, wanted: frozenset[str], row: Row) -> list[Row]:
        names = ("text", "unit") if isinstance(self.batches, HashPartition) else ("text",)
        kept = {name: row[name] for name in names}
        return [kept | {KEY: batch} for batch in self.joined(row) if batch in wanted]


# Outcomes


def outcomes_here(
    members: dict[str, list[Row]], make_worker: Callable[[], BatchWorker], task_size: int
) -> Generator[list[Outcome]]:
    """Have one worker in this process do the batches. It takes their rows out of `members`."""
    with (
        closing(make_worker()) as worker,
        closing(worker.work(_tasks_here(members, task_size))) as outcomes,
    ):
        for outcome in outcomes:
            yield [outcome]


def _tasks_here(members: dict[str, list[Row]], task_size: int) -> Iterator[list[Row]]:
    for names in in_parts(list(members), task_size):
        yield [row | {KEY: batch} for batch in names for row in members.pop(batch)]


def outcomes_on_ray(
    config: Config,
    parts: Iterator[Part],
    load: Callable[[], Engine],
    make_worker: Callable[[Engine], BatchWorker],
    task_size: int,
    on_loss: OnLoss = lambda worker_id, error: None,
) -> Generator[list[Outcome]]:
    """Have a pool of `runtime.actors` actors do the batches, each with an engine that it loads and
    a worker that gets about `task_size` batches at a time. A part goes to another actor, of which
    `on_loss` is told, until `runtime.max_attempts` were lost with it. An empty list comes each
    second without an outcome.

    Raises DprayError as a task raised it; InputError or EngineError for a worker that cannot be
    made; Ray's error otherwise. Batches that no other actor may take raise it at the end."""
    runtime = config.runtime
    with own_errors():
        # Sent once, however many actors there are: it may hold a whole plan.
        shared = ray.put(partial(PartWorker, make_worker, task_size))
        actors, size = engine_actors(config, load, shared, task_size)
        pool = ActorPool(actors, runtime.max_attempts, size, runtime.wait, on_loss=on_loss)
        with closing(pool.run(parts)) as steps:
            for results in steps:
                yield [outcome for _, outcome in results]


def batch_texts(rows: Iterable[Row]) -> dict[str, list[str]]:
    """Return the texts of each batch. Raises RuntimeError unless every batch comes with its one
    placeholder: without it the rows are a part of a batch, which must not be decoded as a whole
    one."""
    texts: dict[str, list[str]] = {}
    placeholders: list[str] = []
    for row in rows:
        members = texts.setdefault(row[KEY], [])
        if row["text"] is None:
            placeholders.append(row[KEY])
        else:
            members.append(row["text"])
    if sorted(placeholders) != sorted(texts):
        raise RuntimeError("a batch did not arrive whole")
    return texts


def block_count(tasks: int, actors: int, rows: int) -> int:
    """Return the number of blocks that `rows` are gathered in: enough that every actor has some of
    its own and that a block is no burden to its machine, and never more than tasks. The driver's
    memory grows with every pair of a block that was read and one that is gathered
    (docs/benchmarks.md), so there are two thousand at most."""
    return max(1, min(tasks, MOST_BLOCKS, max(BLOCKS_PER_ACTOR * actors, rows // BLOCK_ROWS)))


# On Ray


def cut_blocks(blocks: list[object], count: int) -> Iterator[Part]:
    """Yield `count` parts of each block, within bounds. Takes the references out of `blocks`, so
    that Ray frees the blocks that are done."""
    count = max(1, min(count, MOST_PARTS))
    blocks.reverse()
    while blocks:
        block = blocks.pop()
        for number in range(count):
            yield Part((block, number, count))


class PartWorker:
    """Has a `BatchWorker` work through parts. Its engine does not run empty between two parts:
    the next one is asked for when the last task of a part is taken."""

    def __init__(
        self, make_worker: Callable[[Engine], BatchWorker], task_size: int, engine: Engine
    ) -> None:
        self._worker = make_worker(engine)
        self.worker_id = self._worker.worker_id
        self._task_size = task_size

    def accept(
        self, block: pa.Table, number: int, count: int, left: Collection[str] | None
    ) -> tuple[Collection[str], list[pa.Table]]:
        """Keep the rows of part `number`, or of its batches that are `left`, and not the block."""
        rows = part_of(block, number, count, left)
        names: list[str] = rows.column(KEY).unique().to_pylist()
        return names, tasks(rows, self._task_size)

    def work(self, parts: Parts, emit: Emit) -> None:
        for outcome in self._worker.work(self._tasks(parts)):
            emit(outcome[KEY], outcome)

    def _tasks(self, parts: Parts) -> Iterator[list[Row]]:
        """Yield the rows of one task after the other: no others are made Python objects."""
        for waiting in parts:
            for task in waiting[:-1]:
                yield task.to_pylist()
            parts.ask()
            for task in waiting[-1:]:
                yield task.to_pylist()


def part_of(
    block: pa.Table, number: int, count: int, only: Collection[str] | None = None
) -> pa.Table:
    """Return the rows of part `number` of a block that is cut in `count`, or those of its batches
    that are in `only`. Only the names bound a part: a block that is gathered again has the same
    parts."""
    names = sorted(block.column(KEY).unique().to_pylist())
    start, end = len(names) * number // count, len(names) * (number + 1) // count
    return _of_batches(block, [name for name in names[start:end] if only is None or name in only])


def tasks(rows: pa.Table, task_size: int) -> list[pa.Table]:
    """Cut rows into tasks of about `task_size` batches."""
    names = sorted(rows.column(KEY).unique().to_pylist())
    number = max(1, round(len(names) / task_size))
    ends = [len(names) * task // number for task in range(number + 1)]
    cuts = (names[start:end] for start, end in pairwise(ends))
    return [_of_batches(rows, cut) for cut in cuts if cut]


def _of_batches(rows: pa.Table, names: Sequence[str]) -> pa.Table:
    column = rows.column(KEY)
    return rows.filter(pc.is_in(column, pa.array(names, column.type)))


def outcome_lists(
    items: Generator[list[T]],
    size: int,
    seconds: float = math.inf,
) -> Generator[list[T]]:
    """Join lists: yield their members as soon as there are `size`, or any that came `seconds` after
    the last ones. An empty list lets the time be looked at. `items` is closed with this one. What
    came before an error, or an interruption, is yielded before that is raised."""
    waiting: list[T] = []
    last = monotonic()
    try:
        with closing(items):
            for members in items:
                waiting += members
                if waiting and (len(waiting) >= size or monotonic() - last >= seconds):
                    found, waiting, last = waiting, [], monotonic()
                    yield found
    except (Exception, KeyboardInterrupt):
        if waiting:
            yield waiting
        raise
    if waiting:
        yield waiting
