"""Tests start a small training on a cluster, and check its charges."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import psutil

from dpray.accounting.accountant import cost
from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.events import PoissonSubsampledGaussian
from dpray.ledger.ledger import Ledger
from dpray.methods.dp_sgd.training.journal import block_steps
from tests.integration.processes import Runs, wait_for, workers_of

METHOD = {
    "name": "dp_sgd", "epochs": 10, "batch_size": 20, "micro_batch_size": 4, "max_length": 32,
    "lora_rank": 2, "records": 4, "noise_multiplier": 1.5, "checkpoint_steps": 5, "zero_stage": 2,
}  # fmt: skip
STEP = PoissonSubsampledGaussian(1 / 3, 1.5)


@contextmanager
def held_in_mid_training(
    run: Runs, process: subprocess.Popen[str] | None, *nodes: subprocess.Popen[bytes]
) -> Iterator[None]:
    """Wait until some blocks of steps are published and another one is begun by an attempt that is
    new, and keep it so meanwhile: the ranks on these nodes stand still, however fast they are."""
    before = set.union(*attempts(run))

    def in_mid_training() -> bool:
        published, under_way = attempts(run)
        return bool(published and under_way - before)

    def held() -> bool:
        if not in_mid_training():
            return False
        stopped[:] = [each for node in nodes for each in workers_of(node, "RayTrainWorker")]
        signal_all(signal.SIGSTOP)
        if in_mid_training():
            return True
        signal_all(signal.SIGCONT)
        return False

    def signal_all(number: signal.Signals) -> None:
        for each in stopped:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)

    stopped: list[psutil.Process] = []
    wait_for(held, process)
    yield
    signal_all(signal.SIGCONT)


def attempts(run: Runs) -> tuple[set[str], set[str]]:
    """The attempts that published a block of steps, and those with one that is not published."""
    if not run.counts()["started"]:
        return set(), set()
    with closing(Ledger.open(run.url)) as ledger:
        published = [(unit, attempt) for unit, (attempt, _) in ledger.published(run.id)]
        unfinished = list(ledger.unfinished(run.id))
    of_blocks = [{at for unit, at in each if block_steps(unit)} for each in (published, unfinished)]
    return of_blocks[0], of_blocks[1]


def assert_charged(run: Runs, report: dict[str, Any], faults: int, least: int = 5) -> None:
    """A fault costs the block that it ends, and the next one where that was begun too."""
    steps = report["steps"]
    assert steps["planned"] == 30 and steps["charged"] == 30 + steps["repeated"]
    assert least <= steps["repeated"] <= 10 * faults
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
