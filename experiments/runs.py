"""What the scripts beside it share: their folders, and a run that is made only once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from dpray import plan
from dpray.evaluation.downstream import Embedded, logistic_regression
from dpray.io.records import read_rows
from dpray.methods.config import load_config
from dpray.types import InputError

HERE = Path(__file__).parent
DATA = Path("../shared/data")
RUNS = Path("out/results")


CLIPS = (
    20.0, 14.0, 10.0, 7.0, 5.0, 3.0, 2.0, 1.5, 1.0, 0.7, 0.5, 0.3, 0.2, 0.1, 0.02, 2e-3, 2e-4,
)  # fmt: skip
"""Values of c to choose from."""


def largest_clip(file: Path, settings: Sequence[str], section: str = "method") -> float:
    """Return the largest c that epsilon pays all texts of a configuration with."""
    for clip in CLIPS:
        with suppress(InputError):
            plan(load_config(file, [*settings, f"{section}.clip_bound={clip}"]))
            return clip
    raise SystemExit(f"{file}: epsilon affords the texts with no clip")


def finished(out: Path) -> bool:
    return (out / "privacy_report.json").exists()


def rows(path: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_rows(str(path))]


def released(out: Path) -> list[dict[str, Any]]:
    """The records of a run."""
    return rows(out / "synthetic.jsonl")


def yaml_number(epsilon: float) -> str:
    return ".inf" if epsilon == float("inf") else f"{epsilon:g}"


def accuracy(train: Embedded, test: Embedded) -> float:
    """Of a logistic regression."""
    return float(np.mean(logistic_regression(train).predict(test.vectors) == test.labels))


def as_embedded(
    records: Sequence[dict[str, Any]], embed: Callable[[list[str]], np.ndarray]
) -> Embedded:
    """The records' vectors and labels."""
    vectors = embed([record["text"] for record in records])
    return Embedded(vectors, np.array([str(record["label"]) for record in records]))


def left(
    asked: Sequence[str], ways: Iterable[str], runs: int, kept: Callable[[str, int], Path]
) -> Iterator[tuple[str, int]]:
    """Yield the runs that are not kept yet, the first of every way before the second of any: those
    that are `asked` for, as WAY or WAY#RUN, or all."""
    for number, name in product(range(runs), [*ways]):
        is_asked = not asked or name in asked or f"{name}#{number}" in asked
        if is_asked and not kept(name, number).exists():
            yield name, number


def make(file: str, out: Path, epsilon: float, changes: Sequence[str] = ()) -> None:
    """Do `dpray run experiments/FILE.yaml` into the folder `out`, with a ledger of its own: the
    texts are public, and every figure is of one run alone."""
    settings = [
        f"output.path={out}",
        f"privacy.ledger=sqlite:///{out}/private/ledger.db",
        f"privacy.epsilon={yaml_number(epsilon)}",
    ]
    command = [sys.executable, "-m", "dpray", "run", str(HERE / f"{file}.yaml")]
    subprocess.run([*command, *settings, *changes], check=True)
