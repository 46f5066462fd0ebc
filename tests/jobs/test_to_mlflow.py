"""`jobs/to_mlflow.py` logs what may be released and nothing else; MLflow itself is not installed
here, and a recorder of the calls stands for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from to_mlflow import log_run

import dpray
from dpray.types import InputError


class Recorder:
    """The part of MLflow's fluent interface that the script calls."""

    def __init__(self) -> None:
        self.name = ""
        self.params: dict[str, Any] = {}
        self.metrics: dict[str, float] = {}
        self.files: list[Path] = []

    @contextmanager
    def start_run(self, *, run_name: str) -> Iterator[None]:
        self.name = run_name
        yield

    def log_params(self, params: dict[str, Any]) -> None:
        self.params = params

    def log_metrics(self, metrics: dict[str, float]) -> None:
        self.metrics = metrics

    def log_artifact(self, path: str) -> None:
        self.files.append(Path(path))

    def log_artifacts(self, folder: str, place: str) -> None:
        assert place == Path(folder).name == "model"
        self.files += Path(folder).iterdir()


@pytest.fixture
def finished(dp_kps: str) -> Path:
    folder = dpray.run(dpray.load(dp_kps)).folder
    for stray in ("notes.txt", "private/evaluation.json", "README.md"):
        (folder / stray).write_text("Marlowe")
    return folder


def test_a_release_and_no_more(finished: Path, tmp_path: Path) -> None:
    (finished / "model").mkdir()
    (finished / "model" / "adapter_config.json").write_text("{}")
    # Without the release's own report, the model would be another run's.
    shutil.copy(finished / "privacy_report.json", finished / "model")
    recorder = Recorder()
    log_run(finished, recorder)
    report = json.loads((finished / "privacy_report.json").read_text())

    assert recorder.name == f"notes {report['ledger']['reservation'][:8]}"
    assert sorted(str(path.relative_to(finished)) for path in recorder.files) == [
        "model/adapter_config.json", "model/privacy_report.json", "privacy_report.html",
        "privacy_report.json", "run.json", "synthetic.jsonl",
    ]  # fmt: skip
    assert recorder.metrics == {
        "epsilon": report["epsilon"], "delta": 1e-5, "llm_calls": 0, "records": 8,
    }  # fmt: skip
    assert recorder.params["method.sequence_length"] == 3
    assert recorder.params["privacy.dataset"] == "notes"
    # No place: neither of the data nor of the ledger.
    assert "data.path" not in recorder.params and "privacy.ledger" not in recorder.params
    logged = json.dumps(recorder.params) + "".join(path.read_text() for path in recorder.files)
    assert str(tmp_path) not in logged and "Marlowe" not in logged


def test_what_is_no_release_is_refused(finished: Path, tmp_path: Path) -> None:
    run = json.loads((finished / "run.json").read_text())
    (finished / "run.json").write_text(json.dumps(run | {"state": "reserved"}))
    report = json.loads((finished / "privacy_report.json").read_text())
    for folder, said in ((finished, "not finished"), (tmp_path / "none", "no such folder")):
        with pytest.raises(InputError, match=said):
            log_run(folder, Recorder())
    (finished / "privacy_report.json").write_text(json.dumps(report | {"not_private": True}))
    with pytest.raises(InputError, match="nothing of it may be released"):
        log_run(finished, Recorder())
