"""What the scripts beside it share: their folders, and a run that is made only once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dpray.evaluation.downstream import Embedded, logistic_regression

HERE = Path(__file__).parent
DATA = Path("../shared/data")
RUNS = Path("out/results")


def finished(out: Path) -> bool:
    return (out / "privacy_report.json").exists()


def yaml_number(epsilon: float) -> str:
    return ".inf" if epsilon == float("inf") else f"{epsilon:g}"


def accuracy(train: Embedded, test: Embedded) -> float:
    """Of a logistic regression."""
    return float(np.mean(logistic_regression(train).predict(test.vectors) == test.labels))


def make(file: str, out: Path, epsilon: float, changes: Sequence[str] = ()) -> None:
    """`dpray run docs/results/FILE.yaml` into the folder `out`, with an account of its own in the
    ledger."""
    account = "-".join(out.relative_to(RUNS).parts)
    settings = [
        f"output.path={out}",
        f"privacy.dataset={account}",
        f"privacy.epsilon={yaml_number(epsilon)}",
    ]
    command = [sys.executable, "-m", "dpray", "run", str(HERE / f"{file}.yaml")]
    subprocess.run([*command, *settings, *changes], check=True)
