"""`dpray run` on a Ray of its own, and what a cluster refuses and reports.

Runs on the cluster of RAY_ADDRESS are in `tests/faults/test_kills.py`, vLLM in an actor too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.processes import MARKER, Cluster, Runs, environment

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("driver")
def test_measured_labels_choose_the_batches_on_the_cluster(
    runs: Callable[..., Runs], cluster: Cluster, capfd: pytest.CaptureFixture[str]
):
    run = runs(
        method__batches="disjoint", method__max_records=12, data__label_proportions="measured",
        privacy__epsilon=80.0, privacy__epsilon_labels=20.0, runtime__actors=2,
    ).with_fault("none")  # fmt: skip
    report = run.here(capfd, cluster.address).report
    assert report["sampling"]["label_mix_source"].startswith("measured")
    assert 2 <= report["batches"]["published"] <= 12 and report["records"] > 0
    assert 20 < report["epsilon"] <= 80


def test_a_run_without_an_address_starts_ray_here(
    runs: Callable[..., Runs], cluster: Cluster, short_folder: Path
):
    run = runs(method__max_records=12, method__max_tokens=3)
    before = len(cluster.workers("Accountant"))
    ended = run.run(RAY_ADDRESS="", RAY_TMPDIR=str(short_folder))
    report = ended.report
    run.assert_whole(report)
    assert report["batches"]["published"] == 12 and report["batches"]["repeated"] == 0
    assert f"{report['records']}" in (run.output / "privacy_report.html").read_text()
    assert json.loads((run.output / "privacy_report.json").read_text()).items() <= report.items()
    assert len(cluster.workers("Accountant")) == before
    logs = [path for path in short_folder.glob("ray/session_*/logs/*") if path.is_file()]
    assert logs and not any(MARKER in path.read_bytes() for path in logs)


def test_a_cluster_that_does_not_know_us_is_bad_input(runs: Callable[..., Runs], tmp_path: Path):
    run = runs(engine__model="owner/name")
    ended = run.finish(run.start(RAY_AUTH_TOKEN="0" * 32))
    assert ended.code == 2
    assert ended.err.splitlines()[-1].startswith("dpray: runtime.ray_address: no connection")
    assert not (tmp_path / "ledger.db").exists(), "nothing is charged"


ERROR_OF_A_TASK = """
import sys, time
from dpray.workers.cluster import start_ray
import ray
from ray._private.utils import push_error_to_driver

start_ray(None)
push_error_to_driver(ray._private.worker.global_worker, "task", "failed on a text")
time.sleep(3)
print("answer")
"""


def test_what_ray_reports_does_not_stand_in_our_answer(cluster: Cluster):
    """Without the setting in `dpray.workers`, Ray prints the error on stdout."""
    ended = subprocess.run(
        [sys.executable, "-c", ERROR_OF_A_TASK],
        env=environment(RAY_ADDRESS=cluster.address),
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "answer\n"
