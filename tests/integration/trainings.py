"""Tests start a small training on a cluster, and check its charges."""

from __future__ import annotations

import json
import subprocess
from contextlib import closing
from typing import Any

from dpray.accounting.accountant import cost
from dpray.accounting.events import PoissonSubsampledGaussian, SelfComposed
from dpray.accounting.ledger import Ledger
from tests.integration.processes import Runs, wait_for

METHOD = {
    "name": "dp_sgd", "epochs": 10, "batch_size": 20, "micro_batch_size": 4, "max_length": 32,
    "lora_rank": 2, "records": 4, "noise_multiplier": 1.5, "checkpoint_steps": 5, "zero_stage": 2,
}  # fmt: skip
STEP = PoissonSubsampledGaussian(1 / 3, 1.5)


def started(run: Runs) -> subprocess.Popen[str]:
    """Return the run's process in mid-training."""
    process = run.start()
    wait_for(lambda: in_mid_training(run), process)
    return process


def in_mid_training(run: Runs) -> bool:
    """Return whether a block of steps is published, and another one begun."""
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
