"""A driver without an engine: shards and gathers rows on Ray, and says how much memory it took.

`python shard_driver.py ROWS...` prints for each number of rows the rows and batches that arrived
whole and this process's peak memory in MB so far.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

from dpray.config.config import parse_config
from dpray.mechanisms.partition import new_salt
from dpray.methods.private_prediction.decoder import group_rows
from dpray.methods.private_prediction.plan import PrivatePredictionPlan as Plan
from dpray.methods.private_prediction.rows import batches_of
from dpray.registry import make_plan
from dpray.runs.cluster import start_ray

FILES = 8


def write_rows(folder: Path, rows: int) -> None:
    for part in range(FILES):
        with open(folder / f"{part}.jsonl", "w") as file:
            for number in range(part, rows, FILES):
                label = "ab"[number % 3 == 0]
                file.write(f'{{"text": "note {number} of a cough", "label": "{label}"}}\n')


def plan_of(folder: Path, rows: int) -> Plan:
    return make_plan(
        parse_config(
            {
                "data": {
                    "path": str(folder),
                    "label": "label",
                    "labels": ["a", "b"],
                    "public_size": rows,
                },
                "privacy": {"epsilon": 4.0, "delta": 1e-9, "dataset": "notes"},
                "method": {"name": "private_prediction"},
                "engine": {"model": "none"},
                "runtime": {"batches_per_task": 64},
            }
        )
    ).with_salt(new_salt())


def count(table: pa.Table) -> dict[str, list[int]]:
    batches = group_rows(table.to_pylist())
    return {"batches": [len(batches)], "rows": [sum(map(len, batches.values()))]}


def gather(plan: Plan) -> dict[str, Any]:
    """Every batch through the decoder's own check that it is whole."""
    counting: Any = count
    gathered = batches_of(plan).gathered(plan.config, list(plan.partition.batch_ids()))
    counts = gathered.map_batches(counting, batch_size=None, batch_format="pyarrow")
    total = {"batches": 0, "rows": 0}
    for block in counts.iter_batches(batch_size=None, prefetch_batches=0):
        for key in total:
            total[key] += int(block[key].sum())
    return total


def main(sizes: list[int]) -> None:
    start_ray(None)
    for rows in sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_rows(folder, rows)
            plan = plan_of(folder, rows)
            start = time.monotonic()
            total = gather(plan)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        seconds = time.monotonic() - start
        expected = plan.partition.num_batches
        print(json.dumps(total | {"expected": expected, "peak_mb": peak, "seconds": seconds}))


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
