"""Workers of Ray that fail at a private text, and quote it.

`python faulty_workers.py PLACE FAULT MARKER CONFIG` runs a configuration on the cluster of
RAY_ADDRESS, with the engine of `tests.faults.driver` unless it trains a model. In the workers,
whose processes call `install` when they start, the function PLACE meets FAULT with the first
private text that it gets:

- `quotes`: an error of pyarrow, torch or pydantic (which checks vLLM's arguments) that repeats it;
- `memory`: the process may take no more memory, and allocates until Python or a library raises;
- `killed`: the kernel's signal to a process that took too much; once, and the file MARKER is made;
- `monitored`: the process fills the memory with the text until Ray's memory monitor ends it; the
  file MARKER is made.

With the PLACE `accountant` the accountant is killed at each operation on the ledger, and not when
the operation is repeated: `before` it, while it is `uncommitted`, or `after` it. MARKER.deaths has
the names.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

PRIVATE = "Marlowe"

PLACES = {
    # name: the module, the function or method in it, the library whose error it raises
    "rows": ("dpray.workers.rows", "record_rows", "pyarrow"),
    "decoder": ("dpray.methods.private_prediction.prompts", "encode_private", "pydantic"),
    "shard": ("dpray.methods.dp_kps.release", "VocabularyShard.load", "pyarrow"),
    "embedder": ("dpray.engines.embedder", "SentenceTransformerEmbedder.embed", "torch"),
    "rank": ("dpray.methods.dp_sgd.control_codes", "record_rows", "torch"),
}


def install() -> None:
    """Change the function that the environment names, in a process that has just started."""
    place, fault, marker = json.loads(os.environ["DPRAY_TEST_FAULT"])
    if place == "accountant":
        from tests.chaos.points import watch_ledger

        watch_ledger(partial(die_once, fault, Path(marker)))
        return
    module, name, library = PLACES[place]
    owner: Any = importlib.import_module(module)
    *classes, name = name.split(".")
    for each in classes:
        owner = getattr(owner, each)
    setattr(owner, name, failing(getattr(owner, name), fault, library, Path(marker)))


def die_once(state: str, marker: Path, point: str) -> None:
    """Kill this process at a point of the state, every other time that somebody comes there."""
    if not point.startswith(state):
        return
    passes = marker.with_suffix(f".{point}")
    if passes.exists():
        passes.unlink()
        return
    passes.touch()
    with open(marker.with_suffix(".deaths"), "a") as file:
        file.write(f"{point}\n")
    os.kill(os.getpid(), signal.SIGKILL)


def failing(
    function: Callable[..., Any], fault: str, library: str, marker: Path
) -> Callable[..., Any]:
    def fails(*arguments: Any, **options: Any) -> Any:
        # `record_rows` yields private texts; its arguments hold none.
        found = function(*arguments, **options) if function.__name__ == "record_rows" else None
        text = next(filter(None, map(private_text, [*arguments, *options.values(), found])), None)
        if text is not None:
            if fault == "quotes":
                quote(text, library)
            elif fault == "memory":
                use_up_the_memory()
            elif fault == "monitored":
                marker.touch()
                fill_the_memory(text)
            elif not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    return fails


def private_text(value: Any) -> str | None:
    """Return an argument as text if it holds the word of all private records."""
    if isinstance(value, bool | int | float | Path) or value is None:
        return None
    if hasattr(value, "__next__"):
        value = [next(value)]
    if hasattr(value, "to_pylist"):
        value = value.to_pylist()
    text = str(getattr(value, "user", value))
    return text if PRIVATE in text else None


def quote(text: str, library: str) -> None:
    """Let a library raise its own error about a text."""
    if library == "pyarrow":
        import pyarrow as pa

        pa.array([text]).cast(pa.int64())
    elif library == "torch":
        import torch

        torch.device(text)
    else:
        from pydantic import TypeAdapter

        TypeAdapter(int).validate_python(text)
    raise AssertionError("no library complained")


def use_up_the_memory() -> None:
    """Allocate more than the process may have, as `ulimit -v` bounds it."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    bound = pages * resource.getpagesize() + 2**26
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    try:
        bytearray(2**30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (bound, resource.RLIM_INFINITY))


def fill_the_memory(text: str) -> None:
    """Fill the memory until Ray ends this process, but for the last 3 GiB of the machine."""
    block = text.encode()
    block *= 2**26 // len(block)
    held = []
    for _ in range(600):
        if psutil.virtual_memory().available > 3 * 2**30:
            held.append(block + b".")
        time.sleep(0.1)
    raise AssertionError("Ray did not end this process")


def run_with_hook(hook: str, fault: list[Any], marker: str, config: str) -> int:
    """Run a configuration on Ray, whose workers call `hook` when they start; the fault is in their
    environment."""
    from dpray.cli import run_command
    from tests.faults import driver

    # After dpray: Ray reads the settings of `dpray.workers` when it is imported.
    ray: Any = importlib.import_module("ray")
    variables = {"DPRAY_TEST_FAULT": json.dumps(fault), "PYTHONPATH": os.pathsep.join(sys.path[1:])}
    environment = {"env_vars": variables, "worker_process_setup_hook": hook}
    ray.init(runtime_env=environment, log_to_driver=False, logging_level="ERROR")
    if "dp_sgd" in Path(config).read_text():  # it trains a real model, which writes the texts
        return run_command(["run", config, "--json"])
    return driver.main("none", marker, config)


def main(place: str, fault: str, marker: str, config: str) -> int:
    hook = "tests.chaos.faulty_workers.install"
    return run_with_hook(hook, [place, fault, marker], marker, config)


if __name__ == "__main__":
    sys.path.insert(1, str(Path(__file__).parents[2]))
    sys.exit(main(*sys.argv[1:5]))
