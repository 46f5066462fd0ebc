"""A run's batches decoded on Ray: read, hash, gather each batch whole on one actor, decode.

Reading and hashing may be repeated by Ray as often as it likes: they draw nothing. The decoding
actors have `max_restarts=0` and `max_task_retries=0`: a lost one ends this execution, and the
runner decides what is run again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import pyarrow as pa
import ray
import ray.data

from dpray.config.config import Config
from dpray.engines.base import Engine
from dpray.io.records import list_files
from dpray.methods.private_prediction.decoder import Attempt, BatchDecoder, Journal
from dpray.methods.private_prediction.plan import PrivatePredictionPlan
from dpray.methods.private_prediction.rows import batch_rows, placeholder
from dpray.runs.cluster import find_error
from dpray.runs.engine import LoadError, try_to_load
from dpray.runs.placement import hide_other_gpus
from dpray.runs.rows import bound_contributions
from dpray.types import DprayError

ROWS = pa.schema(
    [("batch", pa.string()), ("text", pa.string()), ("unit", pa.string()), ("rank", pa.int64())]
)
CHUNK = 1024


def decode_on_ray(
    plan: PrivatePredictionPlan,
    journal: Journal,
    attempt: Attempt,
    batches: Sequence[str],
    load: Callable[[], Engine],
) -> Generator[list[dict[str, Any]]]:
    """Yield outcomes, a task's at a time; the driver holds one task's outcomes and the batches'
    names.

    Raises what ended the execution: a DprayError of a task as itself, InputError or EngineError for
    an engine that an actor cannot load, anything else as Ray's error.
    """
    runtime = plan.config.runtime
    decoded = _gathered(plan, batches).map_batches(
        DecodingActor,
        batch_size=None,
        batch_format="pyarrow",
        fn_constructor_kwargs={
            "plan": plan,
            "journal": journal,
            "attempt": attempt,
            "load": load,
        },
        compute=ray.data.ActorPoolStrategy(min_size=runtime.min_actors, max_size=_most(plan)),
        num_cpus=runtime.cpus_per_actor,
        num_gpus=runtime.gpus_per_actor or None,
        max_restarts=0,
        max_task_retries=0,
    )
    try:
        tables: Iterable[Any] = decoded.iter_batches(
            batch_size=None, batch_format="pyarrow", prefetch_batches=0
        )
        for table in tables:
            outcomes = [json.loads(outcome) for outcome in table.column("outcome").to_pylist()]
            yield [outcome for outcome in outcomes if "unloaded" not in outcome]
            for outcome in outcomes:
                if "unloaded" in outcome:
                    raise LoadError(**outcome["unloaded"]).error()
    except Exception as error:
        if (ours := find_error(error, DprayError)) is not None:
            raise ours from None
        raise


def shard(plan: PrivatePredictionPlan) -> ray.data.Dataset:
    """The rows of all files with their batches, streamed: one read task a file."""
    config = plan.config
    files = list_files(config.data.path)
    read: Any = partial(_read, plan=plan)
    rows = ray.data.from_items(
        [{"file": file} for file in files], override_num_blocks=len(files)
    ).map_batches(read, batch_size=1)
    if config.data.unit is not None:
        bound: Any = partial(_bound, most=config.data.max_records_per_unit)
        rows = rows.repartition(_partitions(config), keys=["unit"]).map_batches(
            bound, batch_size=None, batch_format="pyarrow"
        )
    return rows


def _gathered(plan: PrivatePredictionPlan, batches: Sequence[str]) -> ray.data.Dataset:
    """Every wanted batch whole in one block, with its place-holder."""
    wanted = frozenset(batches)
    rows = shard(plan)
    if len(wanted) < plan.partition.num_batches:
        reference = ray.put(wanted)
        rows = rows.map_batches(
            lambda table: _only(table, ray.get(reference)), batch_format="pyarrow", batch_size=None
        )
    places = ray.data.from_arrow(
        pa.Table.from_pylist([placeholder(batch) for batch in batches], schema=ROWS)
    )
    tasks = -(-len(batches) // plan.config.runtime.batches_per_task)
    return rows.union(places).repartition(tasks, keys=["batch"])


def _read(files: dict[str, Any], plan: PrivatePredictionPlan) -> Iterator[pa.Table]:
    for file in files["file"]:
        chunk = []
        for row in batch_rows(str(file), plan.config.data, plan.template, plan.partition):
            chunk.append(row)
            if len(chunk) == CHUNK:
                yield pa.Table.from_pylist(chunk, schema=ROWS)
                chunk = []
        if chunk:
            yield pa.Table.from_pylist(chunk, schema=ROWS)


def _bound(table: pa.Table, most: int) -> pa.Table:
    return pa.Table.from_pylist(bound_contributions(table.to_pylist(), most), schema=ROWS)


def _only(table: pa.Table, wanted: frozenset[str]) -> pa.Table:
    return table.filter(pa.array([batch in wanted for batch in table["batch"].to_pylist()]))


class DecodingActor:
    """The actor of the pool; all it knows is in `BatchDecoder`. Where the engine cannot be loaded,
    it answers with the reason, and begins no batch."""

    def __init__(
        self,
        plan: PrivatePredictionPlan,
        journal: Journal,
        attempt: Attempt,
        load: Callable[[], Engine],
    ) -> None:
        hide_other_gpus()
        self.decoder = try_to_load(lambda: BatchDecoder(plan, journal, attempt, load()))

    def __call__(self, table: pa.Table) -> Iterator[pa.Table]:
        if isinstance(self.decoder, LoadError):
            yield pa.table({"outcome": [json.dumps({"unloaded": asdict(self.decoder)})]})
            return
        for outcome in self.decoder.decode(table.to_pylist()):
            yield pa.table({"outcome": [json.dumps(outcome)]})


def _most(plan: PrivatePredictionPlan) -> int:
    runtime = plan.config.runtime
    return max(runtime.actors, runtime.min_actors)


def _partitions(config: Config) -> int:
    return max(1, min(200, config.data.public_size // 10_000))
