"""`dpray run` on a Ray of its own, and what a cluster refuses and reports.

Runs on the cluster of RAY_ADDRESS are in `tests/faults/test_kills.py`, vLLM in an actor too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dpray.workers.cluster as cluster_module
from dpray.io.file_list import file_digests
from dpray.mechanisms.randomness import generator, new_key
from dpray.methods.config import parse_config
from dpray.methods.dp_sgd.algorithm import fine_tune
from dpray.methods.dp_sgd.release import shards_here, shards_on_ray
from dpray.methods.dp_sgd.training.model import load_loss, save_model
from dpray.methods.dp_sgd.training.token_files import MappedUnits
from dpray.methods.dp_sgd.training.training import ReferenceTrainer
from dpray.methods.registry import make_plan
from dpray.runs.plan import Plan
from dpray.runs.session import LabelCounter
from dpray.types import InputError
from dpray.workers.cluster import hash_files
from dpray.workers.placement import placed
from dpray.workers.shards import Shards
from tests.integration import train_driver
from tests.integration.processes import MARKER, Cluster, Runs, environment
from tests.methods.dp_sgd.training.states import weights_of

pytestmark = pytest.mark.slow


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


@pytest.mark.usefixtures("driver")
def test_tasks_hash_the_files_and_an_error_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, missing = tmp_path / "parts", str(tmp_path / "gone.jsonl")
    folder.mkdir()
    for number in range(20):
        (folder / f"{number:02}.jsonl").write_text(f'{{"text": "{MARKER.decode()} {number}"}}\n')
    monkeypatch.setattr(cluster_module, "HASHED_HERE", 0)
    monkeypatch.setattr(cluster_module, "file_digest", None)  # this process hashes nothing
    shares: list[float] = []
    assert hash_files(str(folder), shares.append) == file_digests(str(folder))
    assert shares == sorted(shares) and shares[-1] == 1
    monkeypatch.setattr(cluster_module, "list_files", lambda path: [path])
    with pytest.raises(InputError) as refused:
        hash_files(missing, shares.append)
    assert str(refused.value) == f"{missing}: cannot be read (FileNotFoundError)"


@pytest.mark.parametrize("unit", [None, "user"])
@pytest.mark.usefixtures("driver")
def test_records_are_encoded_on_the_cluster_as_here(
    records_file: Path,
    settings: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    unit: str | None,
):
    def units(name: str, write: Callable[[Plan, Path], Any]) -> tuple[int, list[Any]]:
        (folder := tmp_path / name).mkdir()
        shards = write(plan, folder)
        mapped = MappedUnits(folder, sorted(shards))
        texts = (mapped[number] for number in range(len(mapped)))
        plain = [[(text.ids.tolist(), text.given) for text in unit] for unit in texts]
        return len(shards), sorted(plain)

    rows = [json.loads(line) for line in records_file.read_text().splitlines()]
    rows = [row | {"user": f"u{i % 17}", "stars": i % 2} for i, row in enumerate(rows)]
    # Parts of a file that hold the same texts.
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

    def counts(**runtime: Any) -> list[int]:
        section = plan.config.runtime.model_copy(update=runtime)
        shards = Shards(plan.config.model_copy(update={"runtime": section}), LabelCounter)
        with closing(shards):
            found: list[int] = sum(shards.each(LabelCounter.counts)).tolist()
        return found

    plan = make_plan(parse_config(keys))
    monkeypatch.setattr("dpray.workers.rows.PART_BYTES", 2000)
    _, here = units("here", shards_here)
    with placed(plan.config, lambda progress: None, True):
        number, there = units("there", shards_on_ray)
        assert sum(counted := counts()) and counted == counts(ray_address="none")
    assert here == there and number > 1
    assert len(there) == (17 if unit else 60)


@pytest.mark.usefixtures("driver")
def test_two_ranks_of_ray_train_make_the_references_steps(
    cluster: Cluster, model_folder: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With adapters and ZeRO 2. One rank and four are in `test_zero`."""
    out, scratch = tmp_path / "model", tmp_path / "scratch"
    train_driver.fine_tune_on_ray(model_folder, str(out), str(scratch))
    assert capfd.readouterr().out == ""
    for path in [*scratch.rglob("*"), *cluster.logs()]:
        assert not path.is_file() or MARKER not in path.read_bytes(), path.name

    ours = train_driver.plan()
    loss = load_loss(model_folder, ours.settings)
    trainer = ReferenceTrainer(ours.mechanism, ours.settings, loss, new_key())
    fine_tune(ours, train_driver.units(model_folder), trainer, generator(new_key()))
    save_model(
        model_folder, ours.settings, weights_of(trainer), tmp_path / "reference", model_folder
    )
    written = load_file(out / "model.safetensors")
    reference = load_file(tmp_path / "reference" / "model.safetensors")
    base = load_file(Path(model_folder) / "model.safetensors")
    assert any((reference[name] != base[name]).any() for name in base)
    for name, weight in reference.items():
        torch.testing.assert_close(written[name], weight, rtol=0, atol=1e-6)
