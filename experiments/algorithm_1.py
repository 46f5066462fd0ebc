"""Algorithm 1 of Amin et al. (2024) as printed, at the size where it pays: 100,000 notes of the
packaged clinic in disjoint batches of 255, at epsilon 1, next to secret batches.

`python experiments/algorithm_1.py [WAY[#RUN]]...` makes the runs that are not there yet, with the
packaged model, and keeps their figures in experiments/measured/algorithm_1. Texts over n come from
plans, without a run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from embedding import embed
from figures import A_SIDE, Figures, distance, keep, mean_recall
from four_methods import make_once
from four_methods_picture import INK, MUTED, picture
from runs import HERE, accuracy, as_embedded, left, released, rows
from sizes import ENGINE, FOLDER, TOKENS, data

import dpray
from dpray.methods.config import load_config

NOTES, EPSILON, DELTA, RUNS_OF_EACH = 100_000, 1.0, 1e-6, 2
BATCH, CLIP = 255, 10.0
TEXTS = 100
"""The texts that a run decodes, of those that epsilon pays for. The others would be like them."""

CONFIGURATION = Path("jobs/private_prediction_cpu.yaml")
KEPT = HERE / "measured" / "algorithm_1"
PICTURE = HERE.parent / "docs" / "results_algorithm_1.svg"
OVER_N = (3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)


class Way(NamedTuple):
    title: str
    keys: Mapping[str, object]


PRINTED: dict[str, object] = {
    "batches": "disjoint", "batch_size": BATCH, "clip": "recentred", "clip_bound": CLIP,
    "candidates": "all", "max_tokens": TOKENS, "max_records": None,
}  # fmt: skip
WAYS = {
    "tau_1.5": Way("Algorithm 1, tau 1.5", {"temperature": 1.5}),
    "tau_2": Way("Algorithm 1, tau 2", {"temperature": 2.0}),
    "tau_2_sparse": Way(
        "Algorithm 1, tau 2, sparse vector (0.5, 0.2)",
        {"temperature": 2.0, "sparse_vector": {"threshold": 0.5, "noise": 0.2}},
    ),
    "secret": Way("secret batches, tau 1", {"temperature": 1.0, "batches": "poisson"}),
}


def settings(keys: Mapping[str, object], notes: int = NOTES) -> list[str]:
    changed = {f"method.{name}": value for name, value in {**PRINTED, **keys}.items()}
    changed |= {
        "data.public_size": notes,
        "privacy.epsilon": EPSILON,
        "privacy.delta": DELTA,
        "engine": ENGINE,
        "runtime.ray_address": "none",
    }
    return [f"{key}={json.dumps(value)}" for key, value in changed.items()]


def planned(keys: Mapping[str, object], notes: int = NOTES) -> int:
    """Return the texts that epsilon pays for; 0 if for none."""
    try:
        plan = dpray.plan(load_config(CONFIGURATION, settings(keys, notes)))
        return int(plan.summary()["records"])  # type: ignore[call-overload]
    except dpray.InputError:
        return 0


def kept(name: str, number: int) -> Path:
    return KEPT / f"{name}-{number}.json"


def measure(name: str, number: int) -> None:
    """Make the run if it is not there, and keep what it is worth."""
    keys, out = WAYS[name].keys, FOLDER / f"algorithm_1-{name}-{number}"
    few = "texts" if keys.get("batches") == "poisson" else "max_records"
    changes = [*settings({**keys, few: TEXTS}), f"data.path={data(NOTES)}"]
    minutes = make_once("../jobs/private_prediction_cpu", out, EPSILON, changes)
    test = as_embedded(rows(FOLDER / "data" / "test.jsonl"), embed)
    made = as_embedded(released(out), embed)
    figures: Figures = {
        "affordable": planned(keys),
        "accuracy": accuracy(made, test),
        "by_label": mean_recall(made, test),
        "distance": distance(made, test, A_SIDE),
        "cpu_minutes": minutes,
    }
    keep(kept(name, number), figures)


def draw() -> None:
    """Draw the texts that epsilon 1 pays for, over n."""
    lines: dict[str, tuple[dict[str, object], str, Any]] = {
        "Algorithm 1, tau 1.5": ({"temperature": 1.5}, INK, (0, (4, 2))),
        "Algorithm 1, tau 2": ({"temperature": 2.0}, INK, "-"),
        "secret batches, tau 1.5": (
            {"temperature": 1.5, "batches": "poisson"},
            "#b5651d",
            (0, (4, 2)),
        ),
        "secret batches, tau 2": ({"temperature": 2.0, "batches": "poisson"}, "#b5651d", "-"),
    }
    with picture(PICTURE, 6.5, 3.8) as figure:
        axes = figure.subplots()
        for title, (keys, color, style) in lines.items():
            texts = {n: planned(keys, n) for n in OVER_N}
            shown = {n: found for n, found in texts.items() if found}
            axes.plot(
                [*shown], [*shown.values()], color=color, linestyle=style, marker="o",
                markersize=4, label=title,
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("records of two labels, n")
        axes.set_title("texts that epsilon 1 pays for", fontsize=9)
        axes.grid(axis="y", color=MUTED, alpha=0.2)
        figure.legend(loc="outside right upper", frameon=False)


def section() -> list[str]:
    """Draw the picture; return the section that shows it."""
    draw()
    lines = [
        "## Algorithm 1 as printed",
        "",
        "![Texts that epsilon 1 pays for, over the number of records](results_algorithm_1.svg)",
        "",
        f"`python experiments/algorithm_1.py` takes {NOTES:,} notes of the packaged clinic and "
        f"the packaged model, with batches of {BATCH}, recentred, c {CLIP:g}, {TOKENS} tokens a "
        f"text, epsilon {EPSILON:g} and delta {DELTA:g}. The picture is of plans with these keys. "
        f"Each run decoded {TEXTS} of the texts that epsilon pays for. The classifier of urgent "
        "notes and the distance are those of the section More records.",
        "",
        "| way | texts that epsilon pays for | accuracy | distance | CPU minutes |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, way in WAYS.items():
        for number in range(RUNS_OF_EACH):
            if kept(name, number).exists():
                found = json.loads(kept(name, number).read_text())
                minutes = found["cpu_minutes"]
                lines.append(
                    f"| {way.title} | {found['affordable']:,} | "
                    f"{found['accuracy']:.3f} | {found['distance']:.3f} | "
                    f"{'' if minutes is None else f'{minutes:.0f}'} |"
                )
    return lines


if __name__ == "__main__":
    for name, number in left(sys.argv[1:], WAYS, RUNS_OF_EACH, kept):
        measure(name, number)
