"""A run's batches decoded in this process, without Ray (`runtime.ray_address: none`)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import islice
from typing import Any

from dpray.engines.base import Engine
from dpray.io.records import list_files
from dpray.methods.private_prediction.decoder import Attempt, BatchDecoder, Journal
from dpray.methods.private_prediction.plan import PrivatePredictionPlan
from dpray.methods.private_prediction.rows import batch_rows, placeholder
from dpray.runs.rows import Row, bound_contributions


def decode_locally(
    plan: PrivatePredictionPlan,
    journal: Journal,
    attempt: Attempt,
    batches: Sequence[str],
    load: Callable[[], Engine],
) -> Generator[list[dict[str, Any]]]:
    """Outcomes, a task's at a time. Holds the whole data set in memory: for small ones."""
    data, runtime = plan.config.data, plan.config.runtime
    rows: list[Row] = []
    for file in list_files(data.path):
        rows += batch_rows(file, data, plan.template, plan.partition)
    if data.unit is not None:
        rows = bound_contributions(rows, data.max_records_per_unit)
    by_batch: dict[str, list[Row]] = {batch: [placeholder(batch)] for batch in batches}
    for row in rows:
        if row["batch"] in by_batch:
            by_batch[row["batch"]].append(row)
    engine = load()
    try:
        decoder = BatchDecoder(plan, journal, attempt, engine)
        waiting = iter(batches)
        while task := list(islice(waiting, runtime.batches_per_task)):
            yield list(decoder.decode(row for batch in task for row in by_batch[batch]))
    finally:
        engine.close()


Decode = Callable[
    [PrivatePredictionPlan, Journal, Attempt, Sequence[str], Callable[[], Engine]],
    Generator[list[dict[str, Any]]],
]
"""A way to decode a run's missing batches, here or on Ray; the last argument loads the engine."""
