"""Runs on the cluster, with and without faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dpray.ledger.ledger import Ledger
from dpray.types import Budget
from tests.faults.trainings import METHOD
from tests.integration.processes import Cluster, Runs, end, short


@pytest.fixture
def short_folder() -> Iterator[Path]:
    with short() as folder:
        yield folder


@pytest.fixture
def runs(
    cluster: Cluster, settings: Callable[..., dict[str, Any]], tmp_path: Path
) -> Iterator[Callable[..., Runs]]:
    """A configuration for the cluster: 12 batches in tasks of two. No process of a run outlives its
    test: it would keep CPUs that the next one waits for."""
    made: list[Runs] = []

    def make(**changes: Any) -> Runs:
        ours = {"runtime__ray_address": None, "runtime__batches_per_task": 2}
        made.append(Runs(settings(**(ours | changes)), cluster, tmp_path))
        return made[-1]

    yield make
    for process in (process for run in made for process in run.processes):
        if process.poll() is None:
            end(process)


@pytest.fixture
def waiting_runs(runs: Callable[..., Runs]) -> Callable[..., Runs]:
    """The same with Poisson batches, one text from each, and engines that wait in the midst of
    their third batch until `marker` is there."""
    poisson = {"method__batches": "poisson", "method__max_records": 12}
    return lambda **changes: runs(**(poisson | changes)).with_fault("waits")


@pytest.fixture
def training(runs: Callable[..., Runs]) -> Callable[..., Runs]:
    """Thirty steps of DP-SGD in blocks of five, on two ranks; a budget with room for more."""

    def make(**changes: Any) -> Runs:
        run = runs(**({"method": METHOD, "runtime__actors": 2} | changes))
        with closing(Ledger.create_or_open(run.url)) as ledger:
            ledger.create_dataset("notes", Budget(500, 1e-3), "record", "add_or_remove_one")
        return run

    return make
