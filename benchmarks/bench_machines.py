"""The machines of a run on a cluster that grows from none: how many there are, and how long one
with a GPU has nothing to do for it.

    python -m benchmarks.bench_machines [--json] [--rows 20000] [--cpus-per-actor 1] [--load 10]

The autoscaler is Ray's own, with machines that are processes of Ray's fake provider: two of two
CPUs, and two of two CPUs and a GPU, which is one that Ray is told of. All share the cores of this
machine. They go when they are idle for six seconds. The run is one of private prediction, with an
engine that takes `--load` seconds to load and answers at once. A GPU has something to do while its
engine loads, or has batches.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import typer

from benchmarks.bench_shards import MAX_TOKENS, PRIVATE_TOKENS, Stub, config_of, write_rows
from dpray.methods.registry import run

BATCH_SECONDS = 0.05


class Slow(Stub):
    """Takes its time to load and for each batch, and notes when it has something to do."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.notes = folder / f"engine-{time.time():.6f}"
        self.note("loads")
        time.sleep(seconds)
        self.note("idle")

    def note(self, state: str) -> None:
        with open(self.notes, "a") as file:
            print(time.time(), state, file=file)

    def decode_lockstep(self, *groups: Any) -> Iterator[Any]:
        self.note("decodes")
        for result in super().decode_lockstep(*groups):
            time.sleep(BATCH_SECONDS)
            yield result
        self.note("idle")


def build(*_: Any, folder: Path, seconds: float, **__: Any) -> Any:
    return Slow(folder, seconds)


def driver(folder: Path, rows: int, cpus: int, load: float) -> None:
    method = {"private_tokens": PRIVATE_TOKENS, "max_tokens": MAX_TOKENS}
    config = config_of(folder / "rows", rows, 100, **method)
    keys = {"actors": 2, "cpus_per_actor": cpus, "gpus_per_actor": 1.0}
    config = config.model_copy(update={"runtime": config.runtime.model_copy(update=keys)})
    run(config, build=partial(build, folder=folder, seconds=load))


def counted(head: subprocess.Popen[bytes]) -> tuple[int, int]:
    """Return the machines with and without a GPU."""
    started = []
    for process in psutil.Process(head.pid).children(recursive=True):
        with suppress(psutil.Error):
            if process.name() == "raylet" and process.status() != psutil.STATUS_ZOMBIE:
                started.append("GPU," in " ".join(process.cmdline()))
    return sum(started), len(started) - 1 - sum(started)  # less the head


def busy(notes: Path, end: float) -> tuple[float, int]:
    """Return the seconds in which an engine had something to do, and how many it began to load."""
    lines = [line.split() for line in notes.read_text().splitlines()]
    times = [float(at) for at, _ in lines] + [end]
    states = [state for _, state in lines]
    spans = zip(states, times, times[1:], strict=False)
    return sum(to - at for state, at, to in spans if state != "idle"), states.count("loads")


def measure(rows: int, cpus: int, load: float) -> dict[str, Any]:
    # Imported late: in the driver, which imports this module too, they would make another token.
    from tests.integration.processes import environment, ray_cluster, short
    from tests.integration.test_autoscaling import AUTOSCALER, machines

    types = partial(machines, gpu={"CPU": 2, "GPU": 1})
    with short() as folder, ray_cluster(folder, cpus=0, machines=types, **AUTOSCALER) as cluster:
        (folder / "rows").mkdir()
        write_rows(folder / "rows", rows)
        ray_environment = environment(RAY_ADDRESS=cluster.address, RAY_worker_niceness="0")
        began, changes, last, gpu_seconds = time.time(), [], (0, 0), 0.0
        command = [sys.executable, "-m", "benchmarks.bench_machines", "--driver", str(folder)]
        command += ["--rows", str(rows), "--cpus-per-actor", str(cpus), "--load", str(load)]
        process, before, ended = subprocess.Popen(command, env=ray_environment), began, 0.0
        # Until the last one has gone: what is idle at the end is paid for, too.
        while not ended or last != (0, 0):
            time.sleep(0.25)
            now, count = time.time(), counted(cluster.head)
            gpu_seconds += last[0] * (now - before)
            if count != last:
                changes.append((round(now - began), *count))
            if process.poll() is not None and not ended:
                ended = now
            before, last = now, count
        if process.returncode:
            raise RuntimeError(f"the run ended with {process.returncode}")
        found = [busy(notes, ended) for notes in folder.glob("engine-*")]
    used = sum(seconds for seconds, _ in found)
    return {
        "seconds": ended - began,
        "gpu_seconds": gpu_seconds,
        "gpu_idle_seconds": gpu_seconds - used,
        "loads": sum(loads for _, loads in found),
        "machines": changes,
    }


def main(
    rows: int = typer.Option(20_000),
    cpus_per_actor: int = typer.Option(1),
    load: float = typer.Option(10.0),
    as_json: bool = typer.Option(False, "--json"),
    folder: Path = typer.Option(None, "--driver", hidden=True),
) -> None:
    if folder is not None:
        driver(folder, rows, cpus_per_actor, load)
        return
    found = measure(rows, cpus_per_actor, load)
    if as_json:
        print(json.dumps(found))
        return
    print("| run, seconds | GPU machines, seconds | of them idle | engines loaded |")
    print("|---:|---:|---:|---:|")
    cells = (found[key] for key in ("seconds", "gpu_seconds", "gpu_idle_seconds", "loads"))
    print("|", " | ".join(f"{cell:.0f}" for cell in cells), "|\n")
    for at, gpus, others in found["machines"]:
        print(f"{at} s: {gpus} with a GPU, {others} without")


if __name__ == "__main__":
    typer.run(main)
