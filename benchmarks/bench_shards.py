"""Rows sharded and gathered on Ray by a driver without an engine: its time, and its memory.

    python -m benchmarks.bench_shards [--json] [1000 100000 1000000]
    python -m benchmarks.bench_shards --run [--batch-size 10] 1000000
    python -m benchmarks.bench_shards --copies 36 --batch-size 255 [--characters 20] 10000 100000
    python -m benchmarks.bench_shards --encode [--characters 200] 10000 100000

Every batch arrives whole on a worker, which checks it as the decoder does. "memory" is the driver's
peak so far, which grows by the batches' names and by Ray's bookkeeping, not by the rows. "read" is
the time of one process that reads the same files row by row, and by how much its memory grows.

`--run` is a whole run instead, from the charge to the release, with an engine that answers at once:
what is left is the work of Ray and of the driver, whose memory and CPU time, of all its threads,
are measured. A size is run in a process of its own: a peak is a process's.

With `--copies` the batches are Poisson ones, and a record is in so many of them. "gathered" is the
size of their rows, each of which the shuffle moves: a record's text for each of its batches.
"worker" is the most that one worker has of its own, besides what it shares with Ray's object store.

`--encode` reads and encodes the records of a training, once in this process, whose CPU time is
measured, and once in Ray's tasks. "it reads" is what the first one reads, for the hash of the files
too. Then each of N ranks checks its share of the shards and maps all of them: the time and the
bytes of the slowest one.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
import pyarrow as pa
import typer

import dpray
from dpray.config.config import Config
from dpray.engines.base import LockstepGroup, LockstepResult, nothing_follows
from dpray.engines.row_variation import POSITIONS
from dpray.io.formats import FilePart
from dpray.mechanisms.randomness import new_key, new_salt
from dpray.methods.config import parse_config
from dpray.methods.dp_sgd.release import shards_here, shards_on_ray
from dpray.methods.dp_sgd.training.token_files import MappedUnits, check_shards
from dpray.methods.private_prediction.plan import PrivatePredictionPlan as Plan
from dpray.methods.registry import make_plan, run
from dpray.workers.cluster import start_ray
from dpray.workers.gathering import BatchGathering, batch_texts
from dpray.workers.rows import record_rows

DEMO_MODEL = Path(dpray.__file__).parent / "demo" / "model"
FILES = 8
TEXT = "a synthetic note of a cough that came in the night and went by itself. " * 3
PRIVATE_TOKENS, MAX_TOKENS = 8, 4
"""Every batch gives two texts."""


def write_rows(folder: Path, rows: int, files: int = FILES, characters: int = 0) -> None:
    for part in range(files):
        with open(folder / f"{part}.jsonl", "w") as file:
            for number in range(part, rows, files):
                text = f"note {number} of a cough".ljust(characters, "h")
                file.write(f'{{"text": "{text}", "label": "{"baa"[number % 3]}"}}\n')


def config_of(folder: Path, rows: int, batch_size: int, **method: object) -> Config:
    return parse_config(
        {
            "data": {
                "path": str(folder),
                "label": "label",
                "labels": ["a", "b"],
                "public_size": rows,
            },
            "privacy": {
                "epsilon": 4.0 if not method else 1000.0,
                "delta": 1e-9,
                "dataset": "notes",
                "ledger": f"sqlite:///{folder}/ledger.db",
            },
            "method": {
                "name": "private_prediction",
                "batches": "disjoint",
                "batch_size": batch_size,
                **method,
            },
            "engine": {"model": "nobody/nothing", "dtype": "float32"},
            "runtime": {"gpus_per_actor": 0},
            "output": {"path": str(folder / "out")},
        }
    )


def plan_of(folder: Path, rows: int, batch_size: int, **method: object) -> Plan:
    plan: Any = make_plan(config_of(folder, rows, batch_size, **method))
    salted: Plan = replace(plan, salt=new_salt())
    return salted


class Stub:
    """An engine that answers at once, always the same."""

    context_length = 512
    shares_public_pass = False

    def rows_at_once(self, tokens: int) -> int:
        return 1000

    def encode(self, prompt: Any) -> tuple[int, ...]:
        return (1, 2 + len(prompt.user))

    def truncate(self, text: str, max_tokens: int) -> str:
        return text[:max_tokens]

    def decode_lockstep(self, groups: Any, following: Any = nothing_follows) -> Any:
        for group in groups:
            text = group
            while text is not None:
                result = self.answer(text)
                text = following(result)
                yield result

    def answer(self, group: LockstepGroup) -> LockstepResult:
        t = group.selector.arguments.get("t", 0) + MAX_TOKENS
        logits = [[0.0]] * POSITIONS
        state = {"t": t, "noisy_threshold": None, "logits": logits, "public": logits}
        return LockstepResult(group.group_id, TEXT, (1,) * MAX_TOKENS, "length", state)

    def close(self) -> None: ...


def build(*_: Any, **__: Any) -> Any:
    return Stub()


def measure_run(rows: int, batch_size: int) -> dict[str, Any]:
    """Run from the charge to the release."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder, rows)
        method = {"private_tokens": PRIVATE_TOKENS, "max_tokens": MAX_TOKENS}
        config = config_of(folder, rows, batch_size, **method)
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        report = run(config, build=build)
        seconds, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_SELF)
        size = (folder / "out" / "synthetic.jsonl").stat().st_size
    if report["records"] != 2 * report["batches"]["total"]:
        raise RuntimeError(f"{report['records']} records")
    return {
        "rows": rows,
        "batches": report["batches"]["published"],
        "records": report["records"],
        "release_mb": size / 1e6,
        "seconds": seconds,
        "cpu_seconds": sum(after[:2]) - sum(before[:2]),
        "began_mb": before.ru_maxrss / 1024,
        "peak_mb": after.ru_maxrss / 1024,
    }


def count(table: pa.Table) -> dict[str, list[int]]:
    batches = batch_texts(table.to_pylist())
    rows = sum(map(len, batches.values()))
    return {"batches": [len(batches)], "rows": [rows], "bytes": [table.nbytes]}


def gather(plan: Plan, key: str) -> dict[str, int]:
    """Pass every batch through the decoder's own check that it is whole."""
    counting: Any = count
    gathering = BatchGathering(plan.batches, key, plan.settings.expected_batch_size)
    gathered = gathering.gathered(plan.config, list(plan.batches.batch_ids()), 64)
    counts = gathered.map_batches(counting, batch_size=None, batch_format="pyarrow")
    total = {"batches": 0, "rows": 0, "bytes": 0}
    for block in counts.iter_batches(batch_size=None, prefetch_batches=0):
        for key in total:
            total[key] += int(block[key].sum())
    return total


def growth_by_reading(plan: Plan, folder: Path) -> float:
    """Read all rows in this process; return the most MB that it held more than before."""
    process, growth, read = psutil.Process(), 0, 0
    before = process.memory_info().rss
    for path in sorted(folder.glob("*.jsonl")):
        for _ in record_rows(FilePart(str(path)), plan.config.data):
            read += 1
            if read % 10_000 == 0:
                growth = max(growth, process.memory_info().rss - before)
    if read != plan.config.data.public_size:
        raise RuntimeError(f"{read} rows were read")
    return growth / 1e6


def poisson_plan(folder: Path, rows: int, batch_size: int, copies: int) -> Plan:
    """Return a plan in which a record is in so many batches, at a price that nobody looks at."""
    texts = round(rows * copies / batch_size)
    method = {"batches": "poisson", "texts": texts, "private_tokens": 1, "temperature": 1000.0}
    return plan_of(folder, rows, batch_size, **method)


class Peak(Thread):
    """Looks four times a second at the processes that this one has started, for the one with most
    memory of its own."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.mb, self._over = 0.0, Event()

    def run(self) -> None:
        this = psutil.Process()
        while not self._over.wait(0.25):
            for child in this.children(recursive=True):
                with suppress(psutil.Error):
                    if "ray::" in child.name():
                        info = child.memory_info()
                        self.mb = max(self.mb, (info.rss - info.shared) / 1e6)

    def end(self) -> float:
        self._over.set()
        self.join()
        return self.mb


def measure_copies(rows: int, batch_size: int, copies: int, characters: int) -> dict[str, Any]:
    peak = Peak()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder, rows, characters=characters)
        plan = poisson_plan(folder, rows, batch_size, copies)
        peak.start()
        start = time.monotonic()
        total = gather(plan, new_key())
        seconds = time.monotonic() - start
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if abs(total["rows"] / (rows * copies) - 1) > 0.05:
        raise RuntimeError(f"{total} arrived of {rows} rows")
    return {
        "rows": rows,
        "batches": total["batches"],
        "copies": total["rows"] / rows,
        "gathered_mb": total["bytes"] / 1e6,
        "seconds": seconds,
        "worker_mb": peak.end(),
        "peak_mb": memory,
    }


def bytes_read() -> int:
    return int(psutil.Process().io_counters().read_chars)


def measure_encoding(rows: int, characters: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        data, here, on_ray = (Path(name) / part for part in ("data", "here", "on_ray"))
        for folder in (data, here, on_ray):
            folder.mkdir()
        write_rows(data, rows, characters=characters)
        tree = config_of(data, rows, 100).model_dump(exclude={"method"})
        tree["method"] = {"name": "dp_sgd", "batch_size": 100}
        tree["engine"] = {"kind": "transformers", "model": str(DEMO_MODEL)}
        plan: Any = make_plan(parse_config(tree))
        start, read = time.process_time(), bytes_read()
        names = shards_here(plan, here)
        found = {"here": time.process_time() - start, "read_mb": (bytes_read() - read) / 1e6}
        start = time.monotonic()
        names = shards_on_ray(plan, on_ray)
        found["seconds"] = time.monotonic() - start
        for ranks in (1, 2, 4):
            of_ranks = []
            for rank in range(ranks):
                start, read = time.monotonic(), bytes_read()
                check_shards(on_ray, sorted(names)[rank::ranks])
                if len(MappedUnits(on_ray, names)) != rows:
                    raise RuntimeError("some records are missing")
                of_ranks.append((time.monotonic() - start, (bytes_read() - read) / 1e6))
            slowest, most = map(max, zip(*of_ranks, strict=True))
            found |= {f"ranks_{ranks}": slowest, f"read_{ranks}": most}
        size = sum(file.stat().st_size for file in data.glob("*.jsonl")) / 1e6
    return {"rows": rows, "batches": 0, "data_mb": size} | found


def measure(rows: int, batch_size: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder, rows)
        plan = plan_of(folder, rows, batch_size)
        start = time.monotonic()
        total = gather(plan, "")
        del total["bytes"]
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


HEADS = {
    "data_mb": "data, MB",
    "here": "one process, CPU seconds",
    "read_mb": "it reads, MB",
    "copies": "copies",
    "gathered_mb": "gathered, MB",
    "seconds": "seconds",
    "worker_mb": "worker's memory, MB",
    "cpu_seconds": "driver's CPU, seconds",
    "began_mb": "driver's memory before, MB",
    "peak_mb": "driver's memory, MB",
    "read_seconds": "read, seconds",
    "read_growth_mb": "read, MB more",
} | {
    key: head
    for n in (1, 2, 4)
    for key, head in ((f"ranks_{n}", f"{n} ranks, seconds"), (f"read_{n}", f"{n} ranks, MB each"))
}


def main(
    sizes: list[int] = typer.Argument(default=[1_000, 100_000, 1_000_000]),
    as_json: bool = typer.Option(False, "--json"),
    whole: bool = typer.Option(False, "--run"),
    batch_size: int = typer.Option(127),
    copies: int = typer.Option(0),
    characters: int = typer.Option(0),
    encode: bool = typer.Option(False, "--encode"),
) -> None:
    start_ray(None)
    if encode:
        found = [measure_encoding(rows, characters) for rows in sizes]
    elif copies:
        found = [measure_copies(rows, batch_size, copies, characters) for rows in sizes]
    else:
        found = [(measure_run if whole else measure)(rows, batch_size) for rows in sizes]
    if as_json:
        print(json.dumps(found))
        return
    heads = {key: head for key, head in HEADS.items() if key in found[0]}
    print("| rows | batches |", " | ".join(heads.values()), "|")
    print("|---:" * (2 + len(heads)) + "|")
    for row in found:
        cells = " | ".join(f"{row[key]:.1f}" for key in heads)
        print(f"| {row['rows']:,} | {row['batches']:,} | {cells} |")


if __name__ == "__main__":
    typer.run(main)
