"""`dpray run` on a Ray of its own, and what a cluster refuses and reports.

Runs on the cluster of RAY_ADDRESS are in `tests/faults/test_kills.py`, vLLM in an actor too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


HASHED = """
import sys
import ray
from dpray.io.file_list import file_digests
from dpray.types import InputError
from dpray.workers import cluster
from dpray.workers.cluster import start_ray

folder, missing = sys.argv[1:]
start_ray(None)
cluster.HASHED_HERE = 0
cluster.file_digest = None  # this process hashes nothing
shares = []
assert cluster.hash_files(folder, shares.append) == file_digests(folder)
assert shares == sorted(shares) and shares[-1] == 1
cluster.list_files = lambda path: [path]
try:
    cluster.hash_files(missing, shares.append)
except InputError as error:
    print(error)
"""


def test_tasks_hash_the_files_and_an_error_names_the_file(cluster: Cluster, tmp_path: Path):
    folder = tmp_path / "parts"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number:02}.jsonl").write_text(f'{{"text": "{MARKER.decode()} {number}"}}\n')
    ended = subprocess.run(
        [sys.executable, "-c", HASHED, str(folder), str(tmp_path / "gone.jsonl")],
        env=environment(RAY_ADDRESS=cluster.address),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stdout == f"{tmp_path}/gone.jsonl: cannot be read (FileNotFoundError)\n", ended


SHARDS = """
import json, sys
from pathlib import Path
from dpray.methods.config import parse_config
from dpray.methods.registry import make_plan
from dpray.methods.dp_sgd.release import shards_here, shards_on_ray
from dpray.methods.dp_sgd.training.token_files import MappedUnits
from dpray.runs.session import LabelCounter
from dpray.workers import rows
from dpray.workers.cluster import start_ray
from dpray.workers.placement import placed
from dpray.workers.shards import Shards

def counts(**runtime):
    runtime = plan.config.runtime.model_copy(update=runtime)
    shards = Shards(plan.config.model_copy(update={"runtime": runtime}), LabelCounter)
    found = sum(shards.each(LabelCounter.counts)).tolist()
    shards.close()
    return found

def units(name, write):
    (folder := Path(sys.argv[2], name)).mkdir()
    shards = write(plan, folder)
    mapped = MappedUnits(folder, sorted(shards))
    texts = (mapped[number] for number in range(len(mapped)))
    return len(shards), sorted([(text.ids.tolist(), text.given) for text in unit] for unit in texts)

plan = make_plan(parse_config(json.loads(sys.argv[1])))
rows.PIECE_BYTES = 2000
_, here = units("here", shards_here)
counted = counts(ray_address="none")
start_ray(None)
with placed(plan.config, lambda progress: None, True):
    number, there = units("there", shards_on_ray)
    assert counts() == counted and sum(counted), counted
assert here == there and number > 1, (number, len(here), len(there))
print(len(there))
"""


@pytest.mark.parametrize("unit", [None, "user"])
def test_records_are_encoded_on_the_cluster_as_here(
    records_file: Path,
    settings: Callable[..., dict[str, Any]],
    cluster: Cluster,
    tmp_path: Path,
    unit: str | None,
):
    rows = [json.loads(line) for line in records_file.read_text().splitlines()]
    rows = [row | {"user": f"u{i % 17}", "stars": i % 2} for i, row in enumerate(rows)]
    # Pieces of a file that hold the same texts.
    rows = rows if unit else [rows[0]] * len(rows)
    records_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = settings(
        method={
            "name": "dp_sgd", "batch_size": 6, "epochs": 1, "noise_multiplier": 4.0,
            "control_columns": {"label": "Kind", "stars": "Stars"},
            "records": 4, "max_length": 64,
        },
        data__attributes={"stars": [0, 1]}, data__label_proportions="measured",
        data__unit=unit, data__max_records_per_unit=2 if unit else 1,
        data__public_size=20_000 if unit else 60, runtime__ray_address=None,
    )  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-c", SHARDS, json.dumps(keys), str(tmp_path)],
        env=environment(RAY_ADDRESS=cluster.address),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stdout == ("17\n" if unit else "60\n"), ended
