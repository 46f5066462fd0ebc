"""`ray job submit -- dpray run`: the configuration travels in the working directory."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.processes import TIMEOUT, Cluster, Ended, Runs, environment

pytestmark = pytest.mark.slow


def test_a_submitted_job_runs_to_its_release(
    runs: Callable[..., Runs], cluster: Cluster, tmp_path: Path
):
    run = runs(method__max_records=12)
    job = tmp_path / "job"
    job.mkdir()
    run.config.rename(job / "config.yaml")
    submit = ["ray", "job", "submit", "--address", cluster.dashboard, "--working-dir", str(job)]
    submitted = subprocess.run(
        [*submit, "--", "python", "-m", "dpray", "run", "config.yaml", "--json"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert submitted.returncode == 0, submitted.stdout[-2000:] + submitted.stderr[-2000:]
    assert "succeeded" in submitted.stdout + submitted.stderr
    [report] = [json.loads(line) for line in submitted.stdout.splitlines() if line[:2] == '{"']
    assert report["batches"]["published"] == 12
    run.assert_whole(report)
    run.assert_nothing_private(Ended(0, submitted.stdout, submitted.stderr))
