"""`ray job submit -- dpray run`: the configuration travels in the working directory."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dpray.accounting.ledger import Ledger
from dpray.types import Budget
from tests.integration.processes import (
    COMMAND_LINES,
    TIMEOUT,
    Cluster,
    Ended,
    Runs,
    environment,
)

pytestmark = pytest.mark.slow


def test_a_submitted_job_runs_to_its_release(
    runs: Callable[..., Runs], cluster: Cluster, tmp_path: Path
):
    run = runs(method__max_records=12)
    job = tmp_path / "job"
    job.mkdir()
    run.config.rename(job / "config.yaml")
    submitted = submit(cluster, job, "-m", "dpray", "run", "config.yaml", "--json")
    assert submitted.returncode == 0, submitted.stdout[-2000:] + submitted.stderr[-2000:]
    assert "succeeded" in submitted.stdout + submitted.stderr
    [report] = [json.loads(line) for line in submitted.stdout.splitlines() if line[:2] == '{"']
    assert report["batches"]["published"] == 12
    run.assert_whole(report)
    run.assert_nothing_private(Ended(0, submitted.stdout, submitted.stderr))


def test_a_job_charges_no_copy_of_a_ledger_that_ray_deletes(
    runs: Callable[..., Runs], cluster: Cluster, tmp_path: Path
):
    """A relative path is one in the unpacked working directory, whether a ledger came along or
    not; so is a relative output."""
    job = tmp_path / "job"
    job.mkdir()
    run = runs(method__max_records=12)
    run.config.rename(job / "config.yaml")
    Ledger.create_or_open(f"sqlite:///{job}/brought.db").create_dataset(
        "notes", Budget(100, 1e-3), "record", "add_or_remove_one"
    )
    create = ["--dataset", "notes", "--epsilon", "4", "--delta", "1e-6"]
    lines = {
        "brought.db lies in a copy": ["run", "config.yaml", "privacy.ledger=sqlite:///brought.db"],
        "new.db lies in a copy": ["run", "config.yaml", "privacy.ledger=sqlite:///new.db"],
        "output.path: out lies in a copy": ["run", "config.yaml", "output.path=out"],
        "ledger.db lies in a copy": ["ledger", "create", "--ledger=sqlite:///ledger.db", *create],
    }
    submitted = submit(cluster, job, COMMAND_LINES, json.dumps(list(lines.values())))
    printed = submitted.stdout + submitted.stderr
    [found] = [json.loads(line) for line in printed.splitlines() if line.startswith("[[")]
    for said, (code, errors) in zip(lines, found, strict=True):
        assert code == 2 and said in errors and "which Ray deletes" in errors
    assert [row["kind"] for row in Ledger.open(f"sqlite:///{job}/brought.db").export()] == [
        "create"
    ]
    assert not (run.output / "synthetic.jsonl").exists()


def submit(cluster: Cluster, job: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["ray", "job", "submit", "--address", cluster.dashboard, "--working-dir", str(job)]
    return subprocess.run(
        [*command, "--", "python", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
