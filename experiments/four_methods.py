"""The four methods beside each other with SmolLM2-135M, for docs/results.md.

`python experiments/four_methods.py DATA[/METHOD]...` makes the runs that are not there yet, the
first run of every cell before the second of any, with the endpoint of Aug-PE where it is wanted.
DATA is a key of SETS, METHOD one of METHODS.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import product
from math import inf, log
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import psutil
import yaml
from reproduction import RUNS_OF_EACH, distance, draw, spread
from runs import DATA, HERE, RUNS, accuracy, as_embedded, finished, make, released, rows

from dpray.api import plan
from dpray.config.config import load_config
from dpray.evaluation.copies import shared_words
from dpray.evaluation.downstream import Embedded
from dpray.evaluation.fidelity import cluster_divergences
from dpray.io.records import read_rows
from dpray.types import InputError

EPSILONS = (1.0, 4.0, 8.0, inf)
METHODS = {
    "private_prediction": "private prediction, secret batches",
    "aug_pe": "Aug-PE",
    "dp_kps": "DP-KPS, with texts",
    "dp_sgd": "DP-SGD, LoRA",
}
FLOOR = 0.001
"""At this epsilon next to nothing of the private texts comes through: such a run shows what the
model and the public texts in its prompts make by themselves."""

AT_FLOOR = ("aug_pe", "dp_kps")
"""The methods whose plans can be made there."""

WITHOUT_NOISE = ("aug_pe", "dp_sgd")
"""The methods that take an infinite epsilon."""

CLIPS = (10.0, 7.0, 5.0, 3.0, 2.0, 1.5, 1.0, 0.7, 0.5, 0.3, 0.2)
"""c: the largest one that epsilon pays all texts with."""

EXAMPLES, LONGEST_EXAMPLE = 40, 500
"""Public texts of a label, and their characters, in the prompts of Aug-PE."""

ENDPOINT = "http://127.0.0.1:8000"
COST = "cost.json"

A_SIDE = 80
"""Records a side of a Fréchet distance; a run may release a few fewer than were asked for."""

COPIED = 8
"""So many words in a row are a copy."""

SAMPLES = 10


READING = """\
One run a row: differences of a few hundredths may be chance.

- The floor is high. SmolLM2 writes little of use without examples, so the prompts of Aug-PE and
  DP-KPS show public texts of the label, which are free, and carry most of what the texts teach a
  classifier. The private records add some accuracy to that from epsilon 1 on, and more epsilon
  adds nothing that 100 texts show.
- Many of these texts repeat a public one for eight words or more. Whoever may not pass the public
  texts on should not show them to the model.
- Private prediction shows a private text in each prompt and no public one. With batches of 16 its
  texts are on the topic and far from the real ones' style (distance, MAUVE), below the floor of the
  others, and epsilon 4 is no better than 1. Larger batches, and prompts with public texts, were not
  tried.
- DP-SGD was not run, nor were Aug-PE without noise, a second run of any row, or the other sets.
"""


class DataSet(NamedTuple):
    epsilons: Sequence[float] = (4.0,)
    runs_of_each: int = 1
    control: str = "Kind"
    """The label's name in the control codes of DP-SGD."""


SETS = {
    "agnews": DataSet(EPSILONS, 3, control="News Type"),
    "yelp": DataSet(EPSILONS, 3, control="Business Category"),
    "banking77": DataSet(control="Question about"),
    "pubmed": DataSet(),
}


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


def cells(data: str, method: str) -> list[Cell]:
    about = SETS[data]
    floor = [FLOOR] if method in AT_FLOOR else []
    epsilons = floor + [e for e in about.epsilons if e < inf or method in WITHOUT_NOISE]
    return [Cell(data, method, e, n) for n, e in product(range(about.runs_of_each), epsilons)]


@cache
def labels(data: str) -> dict[str, float]:
    """The share of each label among the public records; none where there are no labels."""
    counts = Counter(row["label"] for row in rows(DATA / data / "public.jsonl"))
    counts.pop(None, None)
    return {label: count / counts.total() for label, count in sorted(counts.items())}


@cache
def size(data: str) -> int:
    """N, the number of private records, which is public here."""
    return sum(1 for _ in read_rows(str(DATA / data / "private.jsonl")))


def changes(cell: Cell) -> list[str]:
    """The settings that the data set adds to the method's configuration, but for epsilon."""
    records, shares = size(cell.data), labels(cell.data)
    found = [
        f"data.path={DATA}/{cell.data}/private.jsonl",
        f"data.public_size={records}",
        f"data.labels={json.dumps(list(shares))}",
        f"data.label_proportions={json.dumps(shares) if shares else 'null'}",
        f"privacy.delta={1 / (records * log(records)):.1e}",
    ]
    if not shares:
        found.append("data.label=null")
    if cell.method == "dp_kps":
        found.append(f"method.few_shot={DATA}/{cell.data}/public.jsonl")
    if cell.method == "dp_sgd" and shares:
        found.append(f"method.control_columns.label={SETS[cell.data].control}")
    if cell.method == "aug_pe":
        found.append(f"method.template={prompts_with_examples(cell)}")
    elif (prompt := prompts(cell)).exists():
        found.append(f"method.template={prompt}")
    if cell.method == "private_prediction":
        found.append(f"method.clip_bound={largest_clip(cell.epsilon, found)}")
    return found


def largest_clip(epsilon: float, settings: list[str]) -> float:
    file = HERE / "smollm2" / "private_prediction.yaml"
    for clip in CLIPS:
        tried = [*settings, f"privacy.epsilon={epsilon}", f"method.clip_bound={clip}"]
        with suppress(InputError):
            plan(load_config(file, tried))
            return clip
    raise SystemExit(f"no clip affords the texts at eps {epsilon:g}")


def prompts(cell: Cell) -> Path:
    return HERE / "smollm2" / "prompts" / f"{cell.data}_{cell.method}.yaml"


def prompts_with_examples(cell: Cell) -> Path:
    """Write the prompts of Aug-PE with public texts of each label, one of which every request for a
    random text shows; return the file."""
    texts: dict[str, list[str]] = {label: [] for label in labels(cell.data) or ("",)}
    for row in rows(DATA / cell.data / "public.jsonl"):
        of_label = texts[row["label"] or ""]
        if len(of_label) < EXAMPLES and len(row["text"]) < LONGEST_EXAMPLE:
            of_label.append(" ".join(row["text"].split()))
    template = yaml.safe_load(prompts(cell).read_text())
    path = RUNS / "smollm2" / "prompts" / prompts(cell).name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(template | {"keywords": texts}, allow_unicode=True))
    return path


def run(cell: Cell, server: psutil.Process | None = None) -> None:
    """Make the run, and write the CPU time that it and the endpoint took beside it."""
    before = cpu_seconds(server)
    make(f"smollm2/{cell.method}", cell.folder, cell.epsilon, changes(cell))
    cost = {"cpu_seconds": cpu_seconds(server) - before}
    (cell.folder / COST).write_text(json.dumps(cost))


def cpu_seconds(server: psutil.Process | None) -> float:
    """The CPU time of the processes that have ended, and of the endpoint's, which have not."""
    ended = getrusage(RUSAGE_CHILDREN)
    found = ended.ru_utime + ended.ru_stime
    for process in [server, *server.children(recursive=True)] if server else []:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found += times.user + times.system
    return float(found)


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


def table(
    data: str, embedded: Callable[[Path], Embedded], embed: Callable[[list[str]], np.ndarray]
) -> list[str]:
    """The section of the page; empty where no run is at hand."""
    found: dict[tuple[str, float], list[Cell]] = {}
    for method in METHODS:
        for cell in cells(data, method):
            if finished(cell.folder):
                found.setdefault((method, cell.epsilon), []).append(cell)
    if not found:
        return []
    test = embedded(DATA / data / "test.jsonl")
    lines = [
        f"## SmolLM2-135M, four methods: {data}, {size(data):,} private records",
        "",
        f"`python experiments/four_methods.py {data}`; settings in experiments/smollm2. Mean and "
        "deviation over runs that owe each other nothing (their number in brackets). Accuracy: a "
        "logistic regression on MiniLM embeddings, trained on what the run released, tested on "
        f"{len(test.labels):,} real test texts. Distance: Fréchet distance of the embeddings of "
        f"{A_SIDE} released texts to those of {A_SIDE} test texts, and MAUVE of the same. "
        f"Eps {FLOOR:g}: the floor, as next to nothing of the private texts comes through. "
        f"Copies: released texts that "
        f"share {COPIED} words in a row with a public text, which prompts may show, and with a "
        "private one. CPU: minutes of one core for a run.",
        "",
        "| method | eps | texts | accuracy | distance | MAUVE | copies, public | private | CPU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    public, real = (
        [row["text"] for row in rows(DATA / data / f"{part}.jsonl")]
        for part in ("public", "private")
    )
    for (method, epsilon), of_cell in found.items():
        records = [released(c.folder) for c in of_cell]
        sets = [as_embedded(rows, embed) for rows in records]
        minutes = [json.loads((c.folder / COST).read_text())["cpu_seconds"] / 60 for c in of_cell]
        texts = [row["text"] for rows in records for row in rows]
        figures = [
            METHODS[method],
            f"{epsilon:g}",
            " to ".join(f"{n}" for n in sorted({len(rows) for rows in records})),
            *measured(sets, test, bool(labels(data))),
            *(f"{copied(texts, of):.0%}" for of in (public, real)),
            f"{np.mean(minutes):.0f}",
        ]
        lines.append("| " + " | ".join(figures) + " |")
    for name in ("public", "private"):
        part = embedded(DATA / data / f"{name}.jsonl")
        few = [draw(part, A_SIDE, seed) for seed in range(RUNS_OF_EACH)]
        figures = measured(few, test, bool(labels(data)))
        lines.append(f"| {name} records | | {A_SIDE} | " + " | ".join(figures) + " | | | |")
    return lines


def samples(data: str) -> list[str]:
    """The section with texts that each method released at epsilon 4, at equal distances in the file
    and unselected. Of those that copy public texts, which have a licence of their own, it says
    just that."""
    public = [row["text"] for row in rows(DATA / data / "public.jsonl")]
    lines: list[str] = []
    for method, name in METHODS.items():
        cell = Cell(data, method, 4.0, 0)
        if finished(cell.folder):
            records = released(cell.folder)
            records = records[:: len(records) // SAMPLES][:SAMPLES]
            longest = shared_words([row["text"] for row in records], public)[0]
            lines += ["", f"{name}:", ""]
            for row, words in zip(records, longest, strict=True):
                text = " ".join(row["text"].split())
                if words >= COPIED:
                    text = f"(shares {words} words in a row with a public text)"
                lines.append(f"1. *{row['label']}*: {text}")
    if not lines:
        return []
    mean = np.mean([len(row["text"].split()) for row in rows(DATA / data / "private.jsonl")])
    return [
        f"## SmolLM2-135M, {SAMPLES} texts a method: {data}, eps 4",
        "",
        f"{SAMPLES} of each release of the table above, at equal distances in its file, as they "
        f"are. A real text has {mean:.0f} words on average.",
        *lines,
    ]


def measured(sets: Sequence[Embedded], test: Embedded, labelled: bool) -> list[str]:
    return [
        spread([accuracy(each, test) for each in sets]) if labelled else "",
        spread([distance(each, test, A_SIDE) for each in sets]),
        spread([mauve(each, test) for each in sets]),
    ]


def mauve(made: Embedded, test: Embedded) -> float:
    """NaN where a run released fewer texts."""
    if len(made.labels) < A_SIDE:
        return float("nan")
    sides = (draw(made, A_SIDE, 0).vectors, draw(test, A_SIDE, 1).vectors)
    return float(cluster_divergences(*sides, seed=0)["mauve"])


def copied(texts: Sequence[str], originals: Sequence[str]) -> float:
    """The share of texts with `COPIED` words in a row of an original."""
    return float(np.mean(shared_words(texts, originals)[0] >= COPIED))


def main(wanted: Sequence[str]) -> None:
    todo = [
        cell
        for data, _, method in (name.partition("/") for name in wanted or SETS)
        for one in ([method] if method else METHODS)
        for cell in cells(data, one)
        if not finished(cell.folder)
    ]
    for cell in sorted(todo, key=lambda cell: cell.number):
        if cell.method == "aug_pe":
            with endpoint() as server:
                run(cell, server)
        else:
            run(cell)


if __name__ == "__main__":
    main(sys.argv[1:])
