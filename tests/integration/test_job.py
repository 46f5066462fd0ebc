"""`jobs/submit.py` and `ray job submit -- dpray run`: the configuration travels in the working
directory, and how the run ends is seen from outside."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from dpray.ledger.ledger import Ledger
from dpray.types import Budget
from tests.integration.metrics_pages import Pages
from tests.integration.processes import (
    COMMAND_LINES,
    FAULT_DRIVER,
    TIMEOUT,
    Cluster,
    Ended,
    Runs,
    end,
    environment,
    wait_for,
)

pytestmark = pytest.mark.slow

JOBS = Path(__file__).parents[2] / "jobs"
RUN_JOB = "import sys, submit; sys.exit(submit.run_job(sys.argv[1]))"


@pytest.fixture(autouse=True)
def no_job_is_left(cluster: Cluster) -> Iterator[None]:
    """No job outlives its test: it would keep CPUs that the next one waits for."""
    from ray.job_submission import JobSubmissionClient

    yield
    client = JobSubmissionClient(cluster.dashboard)
    for job in client.list_jobs():
        if job.submission_id and not job.status.is_terminal():
            client.stop_job(job.submission_id)
            wait_for(lambda job=job: client.get_job_status(job.submission_id).is_terminal())


def test_a_job_is_watched_and_stopped_from_outside_and_goes_on_to_its_release(
    waiting_runs: Callable[..., Runs], cluster: Cluster, tmp_path: Path
):
    """The metrics pages are read while it waits in the midst of a batch; there `ray job stop` ends
    it, and the same command goes on."""
    run = waiting_runs(privacy__dataset="watched")
    entrypoint = f"python {FAULT_DRIVER} waits {run.marker} {run.config}"
    submit = partial(submitter, cluster, tmp_path, "-c", RUN_JOB, entrypoint, PYTHONPATH=str(JOBS))
    process = submit()
    wait_for(lambda: run.engines_waited() and run.in_mid_batch(), process)
    rows = len(Path(run.tree["data"]["path"]).read_text().splitlines())
    pages = Pages(cluster)
    # Three reports: Ray drops a gauge that is set but once after two of them. By then a finished
    # batch is handed over, though others of its task are not there.
    time.sleep(15)
    published = run.counts()["published"]
    wait_for(lambda: pages.value("ray_dpray_activity_done", run=run.id) == published, pause=1)
    pages.assert_public("watched", rows)
    budget = pages.of_dataset("watched")
    assert 0 < budget["reserved_epsilon"] < budget["budget_epsilon"] == 50
    assert pages.value("ray_dpray_run_epsilon", run=run.id) == budget["reserved_epsilon"]
    assert pages.value("ray_dpray_activity_parts", run=run.id) == 12
    assert pages.value("ray_dpray_run_attempts", run=run.id) == 1
    tokens = pages.value("ray_dpray_tokens_total", run=run.id)
    private = pages.value("ray_dpray_private_tokens_total", run=run.id)
    assert tokens and private and 0 < private <= tokens

    assert process.stderr is not None
    # Ray's own lines come before.
    job = next(found[1] for line in process.stderr if (found := re.match(r"job (\S+);", line)))
    stop = ["ray", "job", "stop", "--address", cluster.dashboard, job]
    subprocess.run(stop, env=environment(), check=True, capture_output=True, timeout=TIMEOUT)
    stopped = finish(process)
    assert stopped.returncode == 4 and "the same command goes on" in stopped.stderr, stopped
    assert run.counts()["published"] == published
    run.assert_nothing_private(Ended(4, stopped.stdout, stopped.stderr))

    run.marker.touch()
    submitted = finish(submit())
    assert submitted.returncode == 0, submitted.stdout[-2000:] + submitted.stderr[-2000:]
    assert "SUCCEEDED" in submitted.stderr
    [report] = [json.loads(line) for line in submitted.stdout.splitlines() if line[:2] == '{"']
    assert report["batches"]["published"] == 12
    run.assert_whole(report)
    run.assert_nothing_private(Ended(0, submitted.stdout, submitted.stderr))


def test_the_submitter_passes_keys_on_and_ends_with_the_runs_exit_code(
    runs: Callable[..., Runs], cluster: Cluster, tmp_path: Path
):
    run = runs(method__max_records=12)
    job = tmp_path / "job"
    job.mkdir()
    run.config.rename(job / "config.yaml")
    Ledger.create_or_open(run.url).create_dataset(
        "too small", Budget(1e-3, 1e-9), "record", "add_or_remove_one"
    )
    command = [str(JOBS / "submit.py"), "config.yaml", "privacy.dataset=too small"]
    ended = finish(submitter(cluster, job, *command))
    assert ended.returncode == 3 and "budget of 'too small' refused" in ended.stdout, ended
    assert "FAILED" in ended.stderr
    run.assert_nothing_private(Ended(3, ended.stdout, ended.stderr))
    stranger = finish(submitter(cluster, job, *command, RAY_AUTH_TOKEN="0" * 32))
    assert stranger.returncode == 2
    assert stranger.stderr.splitlines()[-1].startswith("no cluster took the job: ")


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


def submitter(
    cluster: Cluster, job: Path, *arguments: str, **variables: str
) -> subprocess.Popen[str]:
    """A Python that submits jobs, in their working directory."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment(RAY_API_SERVER_ADDRESS=cluster.dashboard, **variables),
        cwd=job,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    try:
        out, err = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        end(process)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def submit(cluster: Cluster, job: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["ray", "job", "submit", "--address", cluster.dashboard, "--working-dir", str(job)]
    return subprocess.run(
        [*command, "--", "python", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
