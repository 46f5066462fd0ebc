"""Runs of private prediction on a Ray cluster of this machine, whose engine sleeps instead of
computing: several nodes fit two cores, and a run takes as long as the model says.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from threading import Timer
from typing import Any, TypeVar

import psutil
from simulation_values import Engine, Load

from dpray.config.config import Config
from dpray.engines.base import Following, LockstepGroup, LockstepResult, nothing_follows
from dpray.methods.registry import run
from dpray.types import Progress
from dpray.workers.groups import GroupActor
from tests.benchmarks.bench_shards import Stub, config_of, write_rows
from tests.integration.processes import ray_cluster, ray_node, short, workers_of

T = TypeVar("T")

HERE = Path(__file__).resolve().parent
PATHS: dict[str, Any] = {"PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}"}
"""The environment in which actors find these modules and the tests' ones."""

SETTLED = 12.0
"""Seconds after which a new cluster's processes take no core any more."""


class SleepingEngine(Stub):
    """Sleeps for the seconds that the steps and prompts of `Engine` take. It takes the next batch
    when it has room for its rows, as vLLM's engine does."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._rng = random.Random()

    def decode_lockstep(
        self, groups: Iterable[LockstepGroup], following: Following = nothing_follows
    ) -> Iterator[LockstepResult]:
        engine, source = self.engine, iter(groups)
        running: list[LockstepGroup] = []
        lengths: list[int] = []
        left: list[int] = []
        waiting = next(source, None)
        if waiting is not None and "t" not in waiting.selector.arguments:
            yield from super().decode_lockstep([waiting, *source])  # rows are compared
            return
        while True:
            rows = sum(len(group.prompts) for group in running)
            while waiting and (not running or rows + len(waiting.prompts) <= engine.room):
                time.sleep(engine.prompt_row * len(waiting.prompts))
                rows += len(waiting.prompts)
                running.append(waiting)
                lengths.append(self._length())
                left.append(lengths[-1])
                waiting = next(source, None)
            if not running:
                return
            time.sleep(engine.step + engine.step_row * rows)
            left = [number - 1 for number in left]
            for place in reversed(range(len(running))):
                if left[place] == 0:
                    result = self._text(running[place], lengths[place])
                    if (text := following(result)) is None:
                        del running[place], lengths[place], left[place]
                    else:
                        running[place], lengths[place] = text, self._length()
                        left[place] = lengths[place]
                    yield result

    def _length(self) -> int:
        drawn = 1 + int(self._rng.expovariate(1 / self.engine.tokens))
        return min(drawn, self.engine.most_tokens)

    def _text(self, group: LockstepGroup, length: int) -> LockstepResult:
        state = {"t": group.selector.arguments["t"] + length, "noisy_threshold": None}
        return LockstepResult(group.group_id, "a text", (1,) * length, "length", state)


def build(engine: Engine, *_: Any, **__: Any) -> Any:
    return SleepingEngine(engine)


def alone(function: Callable[..., T], *arguments: Any) -> T:
    """Return what the function answers in a new process: libraries are loaded there, and nothing is
    left of another cluster."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


@contextmanager
def nodes(number: int, cpus: int) -> Iterator[Path]:
    """Start a cluster of nodes with so many CPUs each, and make this process a driver of it. Yields
    a folder."""
    with ExitStack() as stack:
        folder = stack.enter_context(short())
        (folder / "ray").mkdir()
        cluster = stack.enter_context(ray_cluster(folder / "ray", cpus=cpus, **PATHS))
        for node in range(1, number):
            options: dict[str, object] = {"address": cluster.address, "num-cpus": cpus}
            stack.enter_context(ray_node(folder / f"node-{node}.out", options, **PATHS))
        time.sleep(SETTLED)
        os.environ["RAY_ADDRESS"] = cluster.address
        yield folder


def configure(folder: Path, engine: Engine, load: Load, actors: int) -> Config:
    """Write the rows, and return the configuration of a run over them."""
    data = folder / "data"
    data.mkdir(exist_ok=True)
    rows = load.batches * load.rows
    write_rows(data, rows, load.pieces, labels="ab")
    method = {
        "private_tokens": engine.texts * engine.most_tokens,
        "max_tokens": engine.most_tokens,
        "max_records": engine.texts * load.batches,
    }
    config = config_of(data, rows, load.rows, **method)
    runtime = {"actors": actors, "batches_per_task": load.task}
    return config.model_copy(update={"runtime": config.runtime.model_copy(update=runtime)})


def real_run(
    number: int, actors: int, engine: Engine, load: Load, killed: float | None
) -> tuple[float, int]:
    """Run private prediction on so many nodes; return its seconds, and how many batches were
    repeated. With `killed`, the process of an actor is killed so many seconds after the first part
    was published."""
    with nodes(number, actors // number) as folder:
        config = configure(folder, engine, load, actors)
        timers: list[Timer] = []

        def on_progress(progress: Progress) -> None:
            published = progress.completed if progress.activity == "batches" else 0
            if killed is not None and published and not timers:
                timers.append(Timer(killed, kill_actor))
                timers[0].start()

        began = time.monotonic()
        report = run(config, on_progress=on_progress, build=partial(build, engine))
        seconds = time.monotonic() - began
    if report["batches"]["published"] != load.batches:
        raise RuntimeError("some batches were not published")
    return seconds, report["batches"]["repeated"]


def kill_actor() -> None:
    """Kill the process of an actor of this process' cluster."""
    workers_of(psutil.Process(), GroupActor.__name__)[0].kill()
