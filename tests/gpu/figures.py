"""All figures of a machine with a GPU, as one JSON, in ten minutes.

    python -m tests.gpu.figures [--small] [--only votes] [--minutes 9.5] [--out FILE]

Every measurement runs in a process of its own. It has a share of the minutes, and what those before
it left. What fails, or is not done in time, leaves the others' figures, and its own up to there.
FILE is written after each of them. What it has from the same hardware is kept, and not measured
again, except what failed; a measurement that `--only` names is.
Installs nothing and asks no hub and no registry; needs torch, transformers and what `make wheels`
has downloaded. `--small` tries the same with small models, on any machine.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch
import typer

QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
ROOT = Path(__file__).resolve().parents[2]
PREFIX = "figure "
"""It begins each line in which a measurement's process prints a row."""

MEASUREMENTS = {
    "rows": ("decoding", 40),
    "chunks": ("decoding", 60),
    "steps": ("training", 35),
    "zero": ("training", 45),
    "votes": ("votes", 50),
    "lockstep": ("decoding", 110),
    "speed": ("training", 120),
    "probe": ("decoding", 110),
    "vllm": ("decoding", 280),
}
"""By name: the module in this folder, and the share of the time of those that are made."""


def hardware() -> dict[str, Any]:
    """Name what was measured: the GPU, or None, its driver, and what runs beside it."""
    libraries = ("transformers", "peft", "opacus", "numpy", "vllm")
    found: dict[str, Any] = {
        "gpu": None,
        "cpu": processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: version(name) for name in libraries if find_spec(name)},
    }
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
        found |= {"gpu": torch.cuda.get_device_name(0), "gpu_gib": round(memory / 2**30, 1)}
        found |= {"driver": driver(), "cuda": torch.version.cuda}
    return found


def version(library: str) -> str:
    [name] = set(metadata.packages_distributions()[library])  # vLLM's CPU build has another name
    return metadata.version(name)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip()


def measured(name: str, small: bool, seconds: float) -> dict[str, Any]:
    """Run a measurement in a process of its own; return its rows, and its failure if it has one."""
    command = [sys.executable, "-m", "tests.gpu.figures", "--worker", name]
    began = time.monotonic()
    failure = None
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command + ["--small"] * small,
            cwd=ROOT,
            env=os.environ | QUIET,
            stdout=output,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its own processes too
            process.wait()
            failure = f"not done in {seconds:.0f} seconds"
        else:
            failure = f"ended with status {status}" if status else None
        output.seek(0)
        lines = [line[len(PREFIX) :] for line in output if line.startswith(PREFIX)]
    found: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1), "rows": []}
    for line in map(json.loads, lines):
        if "failure" in line and len(line) == 1:
            failure = line["failure"]
        else:
            found["rows"].append(line)
    return found | ({"failure": failure} if failure else {})


def work(name: str, small: bool) -> None:
    """Print the rows of a measurement as they come, in its own process."""
    for row in rows_of(name, small):
        print(f"\n{PREFIX}{json.dumps(row)}", flush=True)


def rows_of(name: str, small: bool) -> Iterator[dict[str, Any]]:
    try:
        module, _ = MEASUREMENTS[name]
        yield from getattr(import_module(f"tests.gpu.{module}"), name)(small)
    except Exception as error:
        yield {"failure": f"{type(error).__name__}: {error}"[:300]}
        raise


def main(
    small: bool = False,
    only: list[str] = [],  # noqa: B006
    minutes: float = 9.5,
    out: Path | None = None,
    worker: str = typer.Option("", hidden=True),
) -> None:
    if worker:
        work(worker, small)
        return
    found: dict[str, Any] = {"hardware": hardware(), "small": small, "measurements": {}}
    if out is not None and out.exists():
        earlier = json.loads(out.read_text())
        if {name: earlier.get(name) for name in ("hardware", "small")} == {
            name: found[name] for name in ("hardware", "small")
        }:
            found = earlier
    made = found["measurements"]
    todo = only or [name for name in MEASUREMENTS if "failure" in made.get(name, {"failure": ""})]
    share = 60 * minutes / (sum(MEASUREMENTS[name][1] for name in todo) or 1)
    saved = 0.0
    for name in [name for name in MEASUREMENTS if name in todo]:
        limit = share * MEASUREMENTS[name][1] + saved
        made[name] = measured(name, small, limit)
        saved = max(0.0, limit - made[name]["seconds"])
        print(f"{name}: {made[name]}", file=sys.stderr, flush=True)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    typer.run(main)
