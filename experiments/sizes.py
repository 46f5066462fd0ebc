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
from typing import Any, NamedTuple

import numpy as np
from clinic_notes import private_notes
from embedding import embed
from figures import A_SIDE, Figures, distance, draw, keep, mean_recall
from four_methods import make_once
from four_methods_picture import INK, MUTED, PAPER, picture
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
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
PICTURE = HERE.parent / "docs" / "results_sizes.svg"
MEASURES = {"accuracy": "accuracy", "distance": "distance, less is better"}
LOOKS = {
    "private_prediction": (INK, "o"),
    "aug_pe": ("#b5651d", "s"),
    "dp_kps": ("#6a3d9a", "^"),
    "dp_sgd": ("#2e7d32", "D"),
    "dp_sgd_larger": ("#2e7d32", "P"),
}


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
        return [*found, "method.records=100", "method.phrases_per_record=10"]
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
    keep(cell.kept, figures)


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


def values(cell: Cell, measure: str) -> list[float]:
    """Return the figure of each run of a cell."""
    found = [c.figures for c in cells(cell.method) if c._replace(number=0) == cell]
    return [value for each in found if each and (value := each[measure]) is not None]


def draw_picture() -> None:
    with picture(PICTURE, 9.5, 3.6) as figure:
        panels = figure.subplots(1, len(MEASURES) * len(EPSILONS))
        for left, right in (panels[:2], panels[2:]):
            right.sharey(left)
        for i, measure in enumerate(MEASURES):
            for j, epsilon in enumerate(EPSILONS):
                panel(panels[i * len(EPSILONS) + j], measure, epsilon)
        handles = [
            Line2D([], [], color=c, marker=m, markersize=5, label=METHODS[name])
            for name, (c, m) in LOOKS.items()
            if any(cell.figures for cell in cells(name))
        ]
        handles.append(
            Line2D([], [], color=MUTED, marker="o", markerfacecolor=PAPER, label="floor, left")
        )
        figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False)


def panel(axes: Axes, measure: str, epsilon: float) -> None:
    for method, (color, marker) in LOOKS.items():
        look: dict[str, Any] = {"color": color, "marker": marker, "markersize": 4}
        runs = {n: values(Cell(method, epsilon, n, 0), measure) for n in SIZES}
        shown = {n: found for n, found in runs.items() if found}
        axes.plot([*shown], [np.mean(found) for found in shown.values()], linewidth=1, **look)
        for n, found in shown.items():
            axes.vlines(n, min(found), max(found), color=color, linewidth=1)
        floor = values(Cell(method, FLOOR, SIZES[0], 0), measure)
        if floor:
            axes.plot(SIZES[0] / 3, np.mean(floor), **look | {"markerfacecolor": PAPER})
    if measure == "accuracy":
        axes.axhline(0.5, color=MUTED, linestyle=(0, (1, 2)))
    axes.set_xscale("log")
    axes.set_xticks(SIZES, [f"{n // 1000}k" for n in SIZES])
    axes.minorticks_off()
    axes.margins(x=0.15)
    axes.set_title(f"{MEASURES[measure]}, eps {epsilon:g}", fontsize=9)
    axes.grid(axis="y", color=MUTED, alpha=0.2)


def section() -> list[str]:
    """Draw the picture; return the section that shows it."""
    draw_picture()
    return [
        "## More records",
        "",
        "![Accuracy and distance of the four methods over the number of records]"
        "(results_sizes.svg)",
        "",
        f"`python experiments/sizes.py` makes {TEXTS} texts of {SIZES[0]:,} to {SIZES[-1]:,} "
        "notes of the packaged clinic, with the packaged model, which has read other clinics' "
        f"notes. The test is {TESTS:,} other notes of the private one. DP-SGD takes {STEPS} steps "
        f"of {BATCH} notes for every size, equal work, or of {LARGER:,} in larger batches. Dots: "
        f"a guess. Floor: epsilon {FLOOR:g}, for DP-SGD the model before its training.",
    ]


if __name__ == "__main__":
    todo = [cell for name in sys.argv[1:] or METHODS for cell in named(name)]
    for each in sorted(todo, key=lambda cell: cell.number):
        if not each.kept.exists():
            measure(each)
