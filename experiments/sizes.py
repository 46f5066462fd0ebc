"""This script runs the four methods on 4,000, 20,000 and 100,000 notes of the packaged clinic, with
the packaged model, to see how much more records help.

`python experiments/sizes.py METHOD[@EPSILON[/NOTES[#RUN]]]...` makes the runs that are not there
yet, METHOD a key of METHODS, and keeps their figures in experiments/measured/sizes. The packaged
model has read notes of many other clinics; the private clinic has an outbreak and a recall, and its
own idea of what is urgent.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from itertools import product
from math import log
from pathlib import Path
from typing import NamedTuple

from clinic_notes import private_notes
from embedding import embed
from figures import A_SIDE, Figures, distance, draw, mean_recall, rounded
from four_methods import make_once
from runs import HERE, RUNS, accuracy, as_embedded, largest_clip, released, rows

from dpray.evaluation.fidelity import mauve

SIZES, EPSILONS = (4_000, 20_000, 100_000), (1.0, 4.0)
TESTS, TEXTS, TOKENS = 1_000, 100, 64
FLOOR = 0.001
BATCH, STEPS = 500, 40
"""B and T of DP-SGD, the same for every size: an equal amount of work."""

LARGER = 2_000
"""B of `dp_sgd_larger`, for the largest size alone, where q is small enough for it."""

METHODS = {
    "private_prediction": "private prediction",
    "aug_pe": "Aug-PE",
    "dp_kps": "DP-KPS, sequences",
    "dp_sgd": "DP-SGD",
    "dp_sgd_larger": "DP-SGD, larger batches",
}
RUNS_OF_EACH = dict.fromkeys(METHODS, 2) | {"dp_sgd": 4}
"""The runs of DP-SGD differ most from each other."""

ENGINE = {
    "kind": "vllm",
    "model": "dpray/demo/model",
    "dtype": "float32",
    "max_model_len": 1024,
    "kv_cache_gib": 1.0,
}
FOLDER = RUNS / "sizes"


class Cell(NamedTuple):
    method: str
    epsilon: float
    notes: int
    number: int

    @property
    def name(self) -> str:
        return f"{self.method}-{self.epsilon:g}-{self.notes}-{self.number}"

    @property
    def kept(self) -> Path:
        return HERE / "measured" / "sizes" / f"{self.name}.json"

    @property
    def figures(self) -> Figures | None:
        return json.loads(self.kept.read_text()) if self.kept.exists() else None


def cells(method: str) -> Iterator[Cell]:
    """Yield the cells of a method, the first run of every one before the second of any. DP-SGD has
    its floor, the model before its training, from `dp_sgd@0.001`."""
    for number in range(RUNS_OF_EACH[method]):
        if method == "dp_sgd_larger":
            yield Cell(method, EPSILONS[0], SIZES[-1], number)
            continue
        yield Cell(method, FLOOR, SIZES[0], number)
        for notes, epsilon in product(SIZES, EPSILONS):
            yield Cell(method, epsilon, notes, number)


def data(notes: int) -> Path:
    """Write so many private notes, the first ones of one draw; return the file."""
    path = FOLDER / "data" / f"{notes}.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        clinic = private_notes(TESTS + max(SIZES), random.Random(7))
        for name, part in [
            ("test", clinic[:TESTS]),
            *((f"{n}", clinic[TESTS : TESTS + n]) for n in SIZES),
        ]:
            lines = "".join(json.dumps(note._asdict()) + "\n" for note in part)
            (path.parent / f"{name}.jsonl").write_text(lines)
    return path


def changes(cell: Cell) -> list[str]:
    """The settings of a run, but for epsilon."""
    found = [
        f"data.path={data(cell.notes)}",
        f"data.public_size={cell.notes}",
        f"privacy.delta={1 / (cell.notes * log(cell.notes)):.1e}",
        "runtime.ray_address=none",
    ]
    if cell.method == "dp_kps":
        return [*found, "method.records=100"]
    found.append(f"engine={json.dumps(ENGINE)}")
    if cell.method.startswith("dp_sgd"):
        batch = LARGER if cell.method == "dp_sgd_larger" else BATCH
        found += [
            f"method.batch_size={batch}",
            f"method.epochs={STEPS * batch / cell.notes}",
            f"method.records={TEXTS}",
            f"method.max_length={TOKENS}",
        ]
        if cell.epsilon == FLOOR:
            found += ["privacy.epsilon=1", "method.learning_rate=1e-9", "method.epochs=0.25"]
        return found
    if cell.method == "aug_pe":
        return [*found, f"method.records={TEXTS}", "method.variations=2"]
    found += [
        "method.batches=poisson",
        f"method.texts={TEXTS}",
        f"method.max_tokens={TOKENS}",
        "method.max_records=null",
    ]
    settings = [*found, f"privacy.epsilon={cell.epsilon}"]
    clip = largest_clip(Path("jobs/private_prediction_cpu.yaml"), settings)
    return [*found, f"method.clip_bound={clip}"]


def measure(cell: Cell) -> None:
    """Make the run if it is not there, and keep what it is worth."""
    out, file = FOLDER / cell.name, cell.method.removesuffix("_larger")
    minutes = make_once(f"../jobs/{file}_cpu", out, cell.epsilon, changes(cell))
    data(cell.notes)
    test = as_embedded(rows(FOLDER / "data" / "test.jsonl"), embed)
    made = as_embedded(released(out), embed)
    enough = len(made.labels) >= A_SIDE
    sides = (draw(made, A_SIDE, 0).vectors, draw(test, A_SIDE, 1).vectors) if enough else None
    figures: Figures = {
        "texts": len(made.labels),
        "accuracy": accuracy(made, test),
        "by_label": mean_recall(made, test),
        "distance": distance(made, test, A_SIDE) if enough else None,
        "mauve": mauve(*sides, seed=0) if sides else None,
        "cpu_minutes": minutes,
    }
    cell.kept.parent.mkdir(parents=True, exist_ok=True)
    cell.kept.write_text(json.dumps(rounded(figures), indent=1) + "\n")
    print(cell.name, rounded(figures), flush=True)


def named(name: str) -> list[Cell]:
    """Return the cells of METHOD[@EPSILON[/NOTES[#RUN]]]."""
    name, _, number = name.partition("#")
    name, _, notes = name.partition("/")
    method, _, epsilon = name.partition("@")
    return [
        cell
        for cell in cells(method)
        if epsilon in ("", f"{cell.epsilon:g}")
        and notes in ("", f"{cell.notes}")
        and number in ("", f"{cell.number}")
    ]


if __name__ == "__main__":
    todo = [cell for name in sys.argv[1:] or METHODS for cell in named(name)]
    for each in sorted(todo, key=lambda cell: cell.number):
        if not each.kept.exists():
            measure(each)
