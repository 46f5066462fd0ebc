"""Rows sharded and gathered on Ray by a driver without an engine: its time, and its memory.

    python tests/benchmarks/bench_shards.py [--json] [1000 100000 1000000]

Every batch arrives whole on a worker, which checks it as the decoder does. "memory" is the driver's
peak so far, which grows by the batches' names and by Ray's bookkeeping, not by the rows. "read" is
the time of one process that reads the same files row by row, and by how much its memory grows.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dpray.config.config import parse_config
from dpray.io.records import Piece
from dpray.mechanisms.partition import new_salt
from dpray.methods.private_prediction.decoder import group_rows
from dpray.methods.private_prediction.release import batches_of
from dpray.methods.private_prediction.resolved import PrivatePredictionPlan as Plan
from dpray.methods.private_prediction.rows import private_rows
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
                "method": {"name": "private_prediction", "batches": "disjoint"},
                "engine": {"model": "none"},
            }
        )
    ).with_salt(new_salt())


def count(table: pa.Table) -> dict[str, list[int]]:
    batches = group_rows(table.to_pylist())
    return {"batches": [len(batches)], "rows": [sum(map(len, batches.values()))]}


def gather(plan: Plan) -> dict[str, int]:
    """Pass every batch through the decoder's own check that it is whole."""
    counting: Any = count
    gathered = batches_of(plan, "").gathered(plan.config, list(plan.batches.batch_ids()), 64)
    counts = gathered.map_batches(counting, batch_size=None, batch_format="pyarrow")
    total = {"batches": 0, "rows": 0}
    for block in counts.iter_batches(batch_size=None, prefetch_batches=0):
        for key in total:
            total[key] += int(block[key].sum())
    return total


def growth_by_reading(plan: Plan, folder: Path) -> float:
    """Read all rows in this process; return the most MB that it held more than before."""
    process, growth, read = psutil.Process(), 0, 0
    before = process.memory_info().rss
    for path in sorted(folder.glob("*.jsonl")):
        for _ in private_rows(Piece(str(path)), plan.config.data, plan.template, by_place=False):
            read += 1
            if read % 10_000 == 0:
                growth = max(growth, process.memory_info().rss - before)
    if read != plan.config.data.public_size:
        raise RuntimeError(f"{read} rows were read")
    return growth / 1e6


def measure(rows: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder, rows)
        plan = plan_of(folder, rows)
        start = time.monotonic()
        total = gather(plan)
        seconds = time.monotonic() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        start = time.monotonic()
        growth = growth_by_reading(plan, folder)
        read_seconds = time.monotonic() - start
    if total != {"batches": plan.batches.num_batches, "rows": rows}:
        raise RuntimeError(f"{total} arrived of {rows} rows")
    return total | {
        "seconds": seconds,
        "peak_mb": peak,
        "read_seconds": read_seconds,
        "read_growth_mb": growth,
    }


def main(
    sizes: list[int] = typer.Argument(default=[1_000, 100_000, 1_000_000]),
    as_json: bool = typer.Option(False, "--json"),
) -> None:
    start_ray(None)
    found = [measure(rows) for rows in sizes]
    if as_json:
        print(json.dumps(found))
        return
    print("| rows | batches | seconds | driver's memory, MB | read, seconds | read, MB more |")
    print("|---:|---:|---:|---:|---:|---:|")
    for row in found:
        print(
            f"| {row['rows']:,} | {row['batches']:,} | {row['seconds']:.1f} | {row['peak_mb']:.0f} "
            f"| {row['read_seconds']:.1f} | {row['read_growth_mb']:.0f} |"
        )


if __name__ == "__main__":
    typer.run(main)
