"""DP-SGD on a real Ray cluster: two ranks; the driver or a worker is killed in mid-training."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from dpray.accounting.accountant import cost
from dpray.accounting.events import PoissonSubsampledGaussian, SelfComposed
from dpray.accounting.ledger import Ledger
from dpray.types import Budget
from tests.integration.processes import Cluster, Runs, end, wait_for

pytestmark = pytest.mark.slow

METHOD = {
    "name": "dp_sgd", "epochs": 10, "batch_size": 20, "micro_batch_size": 4, "max_length": 32,
    "lora_rank": 2, "records": 4, "noise_multiplier": 1.5, "checkpoint_steps": 5, "zero_stage": 2,
}  # fmt: skip
STEP = PoissonSubsampledGaussian(1 / 3, 1.5)


@pytest.fixture
def training(
    cluster: Cluster, settings: Callable[..., dict[str, Any]], tmp_path: Path
) -> Callable[..., Runs]:
    """Thirty steps in blocks of five, on two ranks; a budget with room for more."""

    def make(**changes: Any) -> Runs:
        tree = settings(runtime__ray_address=None, runtime__actors=2)
        tree["method"] = METHOD | changes
        run = Runs(tree, cluster, tmp_path)
        with closing(Ledger.create_or_open(run.url)) as ledger:
            ledger.create_dataset("notes", Budget(500, 1e-3), "record", "add_or_remove_one")
        return run

    return make


@contextmanager
def started(run: Runs) -> Iterator[subprocess.Popen[str]]:
    """Its process, in mid-training; it does not outlive a test that fails."""
    process = run.start()
    try:
        wait_for(lambda: in_mid_training(run), process)
        yield process
    finally:
        if process.poll() is None:
            end(process)


def in_mid_training(run: Runs) -> bool:
    """A block of steps is published, and another one begun."""
    counts = run.counts()
    # The training as a whole is begun too.
    return counts["published"] > 0 and counts["started"] > counts["published"] + 1


def assert_charged(run: Runs, report: dict[str, Any], most_repeated: int) -> None:
    steps = report["steps"]
    assert steps["planned"] == 30 and steps["charged"] == 30 + steps["repeated"]
    assert 5 <= steps["repeated"] <= most_repeated
    assert report["epsilon"] == cost(SelfComposed(STEP, steps["charged"]), 1e-5).epsilon
    with closing(Ledger.open(run.url)) as ledger:
        assert ledger.verify() == []
        account = ledger.account("notes")
        units = [unit for unit, _ in ledger.published(run.id)]
    assert account is not None
    charged = [charge.event.terms()[STEP] for charge in account.charges]
    assert charged[0] == 30 and sum(charged[1:]) == steps["repeated"]
    assert len(units) == len(set(units)) == 7
    assert len(run.synthetic()) == report["records"] > 0
    beside = json.loads((run.output / "model" / "privacy_report.json").read_text())
    assert beside | {"output": str(run.output)} == report


def test_driver_killed_in_mid_training(training: Callable[..., Runs]) -> None:
    run = training()
    with started(run) as process:
        process.kill()
        assert run.finish(process).code < 0
    assert not (run.output / "synthetic.jsonl").exists() and not (run.output / "model").exists()
    assert_charged(run, run.run().report, 10)


def test_worker_killed_in_mid_training(training: Callable[..., Runs], cluster: Cluster) -> None:
    """The runner, and nobody else, starts the training again, from the last checkpoint."""
    run = training()
    with started(run) as process:
        workers = cluster.workers("RayTrainWorker")
        assert len(workers) == 2
        with suppress(psutil.NoSuchProcess):
            workers[1].kill()
        assert_charged(run, run.finish(process).report, 10)
