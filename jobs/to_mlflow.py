"""Log a finished run to MLflow: what it was configured with and cost, and the files to release.

    pip install mlflow
    export MLFLOW_TRACKING_URI=http://mlflow:5000
    python jobs/to_mlflow.py out/notes

Everything comes from the files of the run that may be released; `private/` is not opened. A run
that was not private is refused, because nothing of it may be released.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpray.io.files import read_json
from dpray.report.card import PublicRelease
from dpray.report.page import PAGE
from dpray.runs.folder import MODEL, RECORDS, TABLES
from dpray.runs.privacy_report import REPORT
from dpray.types import InputError

FILES = (RECORDS, *TABLES, REPORT, PAGE, "run.json")
NUMBERS = ("epsilon", "delta", "noise_multiplier", "llm_calls", "records")


def parameters(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a run.json's configuration, which names no place; none that is null."""
    sections: Mapping[str, Mapping[str, Any]] = run["config"]
    return {
        f"{section}.{key}": value
        for section, keys in sections.items()
        for key, value in keys.items()
        if value is not None
    }


def numbers(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a privacy report that a tracker compares runs by."""
    found = {name: report.get(name) for name in NUMBERS}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def log_run(folder: Path, mlflow: Any) -> None:
    """Log the run in `folder`. Raises InputError for one that is not finished, or not private."""
    release = PublicRelease.of(folder, None, "")
    run = read_json(folder / "run.json")
    if run["state"] != "finished":
        raise InputError(f"{folder}: this run is not finished")
    with mlflow.start_run(run_name=f"{release.name} {run['run_id'][:8]}"):
        mlflow.log_params(parameters(run))
        mlflow.log_metrics(numbers(release.report.to_json()))
        for name in FILES:
            if (folder / name).exists():
                mlflow.log_artifact(str(folder / name))
        if release.has_model:
            mlflow.log_artifacts(str(folder / MODEL), MODEL)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python jobs/to_mlflow.py RUN_DIR")
    import mlflow

    try:
        log_run(Path(sys.argv[1]), mlflow)
    except InputError as error:
        sys.exit(f"to_mlflow: {error}")
