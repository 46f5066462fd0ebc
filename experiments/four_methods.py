"""The four methods beside each other with SmolLM2-135M; four_methods_table.py puts
their figures into docs/results.md.

`python experiments/four_methods.py DATA[/METHOD[@EPSILON[#RUN]]]...` makes the runs that are not
there yet, the first run of every cell before the second of any, with the endpoint of Aug-PE where
it is wanted, and keeps their figures in experiments/measured.
DATA is a key of SETS, METHOD one of METHODS, RUN a number from 0 on.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import product
from math import inf, log
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

import psutil
import yaml
from figures import Figures, Yardstick, rounded
from runs import HERE, RUNS, finished, largest_clip, make, released, rows
from sets import (
    SETS,
    TWICE,
    VARIANTS,
    is_short,
    label_shares,
    labels,
    part,
    public_of_others,
    short_public_texts,
    size,
)

METHODS = {
    "private_prediction": "private prediction, secret batches",
    "private_prediction_bare": "private prediction, prompts without public texts",
    "private_prediction_other": "private prediction, texts of other sets in prompts",
    "private_prediction_schema": "private prediction, with a schema",
    "aug_pe": "Aug-PE",
    "dp_kps": "DP-KPS, with texts",
    "dp_sgd": "DP-SGD, LoRA",
    "dp_sgd_longer": "DP-SGD, LoRA, four epochs",
    "dp_sgd_larger": "DP-SGD, LoRA, ten epochs in batches of 1,000",
    "dp_sgd_public": "DP-SGD, LoRA, tuned on public records first",
    "dp_sgd_other": "DP-SGD, LoRA, tuned on other sets' public records first",
    "chain_kps_aug_pe": "DP-KPS, then Aug-PE",
    "chain_kps_private_prediction": "DP-KPS, then private prediction",
    "chain_kps_dp_sgd": "DP-KPS, then DP-SGD",
    "chain_topics_aug_pe": "topics, then Aug-PE",
}
FLOOR = 0.001
"""At this epsilon next to nothing of the private texts comes through: such a run shows what the
model and the public texts in its prompts make by themselves. With `TUNED_BEFORE` it is the run
that tunes on public records alone."""

TUNED_BEFORE = ("dp_sgd_public", "dp_sgd_other")
OF_CODED = ("private_prediction_other", "dp_sgd_larger", "dp_sgd_other")
"""Ways that are tried on the coded sets alone."""

NO_FLOOR = ("dp_sgd",)
"""The methods whose plans cannot be made there. For a coded set the floor of DP-SGD is the model
before its training: a run whose steps are too small to change it."""

UNTUNED = ("privacy.epsilon=1", "method.learning_rate=1e-9", "method.epochs=0.1")

WITHOUT_NOISE = ("aug_pe", "dp_sgd")
"""The methods that take an infinite epsilon."""

EXAMPLES = 40
"""Public texts of a label in the prompts of Aug-PE."""

ENDPOINT = "http://127.0.0.1:8000"
COST = "cost.json"


class Cell(NamedTuple):
    """One run."""

    data: str
    method: str
    epsilon: float
    number: int

    @property
    def folder(self) -> Path:
        name = f"{self.method}-{self.epsilon:g}-{self.number}"
        return RUNS / "smollm2" / self.data / name

    @property
    def file(self) -> str:
        """The name of its configuration in experiments/smollm2, and of its prompts."""
        name = self.method
        for variant in ("_bare", "_schema", "_longer", "_larger", "_public", "_other"):
            name = name.removesuffix(variant)
        return name

    @property
    def section(self) -> str:
        """Return the section with the settings of the method that makes the texts."""
        return "methods.1" if self.method.startswith("chain_") else "method"

    @property
    def kept(self) -> Path:
        """The file of its figures, which is committed."""
        return HERE / "measured" / "smollm2" / self.data / f"{self.folder.name}.json"

    @property
    def figures(self) -> Figures | None:
        """The figures that are kept; None where the run was not measured."""
        if not self.kept.exists():
            return None
        found: Figures = json.loads(self.kept.read_text())["figures"]
        return found


def cells(data: str, method: str) -> list[Cell]:
    about = SETS[data]
    if method in about.left_out or (method in OF_CODED and not about.coded):
        return []
    if method == "dp_sgd_larger":
        return [Cell(data, method, 1.0, n) for n in range(about.runs_of_each)]
    if method in VARIANTS:
        public_alone = [FLOOR] if method == "dp_sgd_public" else []
        epsilons = [*public_alone, *((1.0, 4.0) if method.endswith("_schema") else (4.0,))]
        return [Cell(data, method, e, n) for n, e in product(range(TWICE), epsilons)]
    floor = [] if method in NO_FLOOR and not about.coded else [FLOOR]
    epsilons = floor + [e for e in about.epsilons if e < inf or method in WITHOUT_NOISE]
    return [Cell(data, method, e, n) for n, e in product(range(about.runs_of_each), epsilons)]


def changes(cell: Cell) -> list[str]:
    """The settings that the data set adds to the method's configuration, but for epsilon."""
    records, shares, about = size(cell.data), labels(cell.data), SETS[cell.data]
    found = [
        f"data.path={part(cell.data, 'private')}",
        f"data.public_size={records}",
        f"data.labels={json.dumps(list(shares))}",
        f"data.label_proportions={json.dumps(shares) if shares else 'null'}",
        f"privacy.delta={1 / (records * log(records)):.1e}",
    ]
    if not shares:
        found.append("data.label=null")
    found += about.settings.get(cell.method, ())
    found += shown_texts(cell)
    if cell.method.startswith("chain_topics"):
        found.append(f"methods.0.public={part(cell.data, 'public')}")
    if cell.method == "dp_sgd_longer":
        found.append("method.epochs=4")
    if cell.method == "dp_sgd_larger":
        found += ["method.epochs=10", "method.batch_size=1000"]
    if cell.method in TUNED_BEFORE:
        found += on_public_first(cell)
    if about.coded and cell.method == "dp_sgd" and cell.epsilon == FLOOR:
        found += UNTUNED
    if cell.file.endswith("dp_sgd") and shares:
        found.append(f"{cell.section}.control_columns.label={about.control}")
    if prompts(cell).exists():
        found.append(f"{cell.section}.template={prompts_of_labels(cell)}")
    if cell.file.endswith("private_prediction"):
        found.append(f"{cell.section}.clip_bound={clip_of(cell, found)}")
    return found


def shown_texts(cell: Cell) -> list[str]:
    """Return the settings that say which public texts the prompts show."""
    if cell.method == "private_prediction_bare":
        return ["method.few_shot=null", "method.longest_copy=null"]
    if cell.method == "private_prediction_other":
        return [f"method.few_shot={public_of_others(cell.data, 'another')}"]
    if SETS[cell.data].coded and cell.method == "dp_kps":
        return ["method.few_shot=null"]
    if cell.method.endswith(("private_prediction", "dp_kps")):
        return [f"{cell.section}.few_shot={short_public_texts(cell.data)}"]
    return []


def on_public_first(cell: Cell) -> list[str]:
    """Return the settings of the run that tunes on public records, or of the one after it."""
    if cell.epsilon != FLOOR:
        return [f"engine.model={cell._replace(epsilon=FLOOR).folder / 'model'}"]
    own = cell.method == "dp_sgd_public"
    public = part(cell.data, "public") if own else public_of_others(cell.data)
    shares = label_shares(public)
    return [
        f"data.path={public}",
        f"data.public_size={len(rows(public))}",
        f"data.labels={json.dumps(list(shares))}",
        f"data.label_proportions={json.dumps(shares)}",
        "privacy.epsilon=.inf",
        "method.batch_size=64",
    ]


def clip_of(cell: Cell, settings: Sequence[str]) -> float:
    """Return the largest clip that the cell's epsilon pays all texts with."""
    file = HERE / "smollm2" / f"{cell.file}.yaml"
    return largest_clip(file, [*settings, f"privacy.epsilon={cell.epsilon}"], cell.section)


def prompts(cell: Cell) -> Path:
    prefix = "coded" if SETS[cell.data].coded else cell.data
    suffix = "_other" if cell.method == "private_prediction_other" else ""
    return HERE / "smollm2" / "prompts" / f"{prefix}_{cell.file}{suffix}.yaml"


def prompts_of_labels(cell: Cell) -> Path:
    """Write the prompts with the labels' names in words; return the file. For Aug-PE they also have
    public texts of each label, one of which every request for a random text shows. Those of a coded
    set say what kind of text the records are."""
    kind = SETS[cell.data].coded
    template = yaml.safe_load(prompts(cell).read_text().replace("KIND", kind))
    template["labels"] = {label: label.replace("_", " ") for label in labels(cell.data)}
    if cell.method.endswith("aug_pe") and not kind:
        template["keywords"] = public_texts(cell)
    path = RUNS / "smollm2" / "prompts" / f"{cell.data}_{cell.method}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(template, allow_unicode=True))
    return path


def public_texts(cell: Cell) -> dict[str, list[str]]:
    """Return short public texts of each label."""
    texts: dict[str, list[str]] = {label: [] for label in labels(cell.data) or ("",)}
    for row in rows(part(cell.data, "public")):
        of_label = texts[row["label"] or ""]
        if len(of_label) < EXAMPLES and is_short(row["text"]):
            of_label.append(" ".join(row["text"].split()))
    return texts


def run(cell: Cell, server: psutil.Process | None = None) -> None:
    """Make the run, and write the CPU time that it and the endpoint took beside it. One that was
    made on a GPU has no such file."""
    before = cpu_seconds(server)
    make(f"smollm2/{cell.file}", cell.folder, cell.epsilon, changes(cell))
    cost = {"cpu_seconds": cpu_seconds(server) - before}
    (cell.folder / COST).write_text(json.dumps(cost))


def cpu_seconds(server: psutil.Process | None = None) -> float:
    """The CPU time of the processes that have ended, and of the endpoint's, which have not."""
    ended = getrusage(RUSAGE_CHILDREN)
    found = ended.ru_utime + ended.ru_stime
    for process in [server, *server.children(recursive=True)] if server else []:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found += times.user + times.system
    return float(found)


def make_once(file: str, out: Path, epsilon: float, changes: Sequence[str]) -> float | None:
    """Make a run unless it is there; return its CPU minutes, or None for one that was made before,
    perhaps on a GPU."""
    if finished(out):
        return None
    before = cpu_seconds()
    make(file, out, epsilon, changes)
    return (cpu_seconds() - before) / 60


@contextmanager
def endpoint() -> Iterator[psutil.Process]:
    """Hold `dpray serve` up for Aug-PE."""
    command = [sys.executable, "-m", "dpray", "serve", str(HERE / "smollm2" / "serve.yaml")]
    process = psutil.Popen(command)
    try:
        while not answers():
            if process.poll() is not None:
                raise SystemExit("the endpoint of Aug-PE did not come up")
            time.sleep(5.0)
        yield process
    finally:
        process.terminate()
        process.wait()


def answers() -> bool:
    try:
        with urlopen(f"{ENDPOINT}/v1/models", timeout=5.0) as response:
            return response.status == 200
    except (URLError, OSError):
        return False


def measure(cell: Cell) -> None:
    """Write what the run is worth to a file that is kept."""
    records, yardstick = released(cell.folder), Yardstick(cell.data)
    cost = cell.folder / COST
    minutes = json.loads(cost.read_text())["cpu_seconds"] / 60 if cost.exists() else None
    figures = yardstick.of_release(records) | {"cpu_minutes": minutes}
    kept = {"figures": rounded(figures), "samples": yardstick.samples(records)}
    cell.kept.parent.mkdir(parents=True, exist_ok=True)
    cell.kept.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def named(name: str) -> list[Cell]:
    """Return the cells of DATA[/METHOD[@EPSILON[#RUN]]]."""
    path, _, wanted = name.partition("@")
    epsilon, _, number = wanted.partition("#")
    data, _, method = path.partition("/")
    found = [cell for one in ([method] if method else METHODS) for cell in cells(data, one)]
    return [
        cell
        for cell in found
        if epsilon in ("", f"{cell.epsilon:g}") and number in ("", f"{cell.number}")
    ]


def main(wanted: Sequence[str]) -> None:
    todo = [cell for name in wanted or SETS for cell in named(name) if not cell.kept.exists()]
    for cell in sorted(todo, key=lambda cell: cell.number):
        if not finished(cell.folder):
            served = cell.method == "aug_pe" and not SETS[cell.data].coded
            with endpoint() if served else nullcontext() as server:
                run(cell, server)
        measure(cell)


if __name__ == "__main__":
    main(sys.argv[1:])
