"""The four methods beside each other with SmolLM2-135M, for docs/results.md.

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

import numpy as np
import psutil
import yaml
from embedding import embedded
from figures import A_SIDE, COPIED, SAMPLES, Figures, Yardstick
from reproduction import RUNS_OF_EACH, draw, spread
from runs import HERE, RUNS, finished, make, released, rows
from sets import SETS, VARIANTS, is_short, labels, part, short_public_texts, size

from dpray.api import plan
from dpray.config.config import load_config
from dpray.types import InputError

METHODS = {
    "private_prediction": "private prediction, secret batches",
    "private_prediction_bare": "private prediction, prompts without public texts",
    "aug_pe": "Aug-PE",
    "dp_kps": "DP-KPS, with texts",
    "dp_sgd": "DP-SGD, LoRA",
    "dp_sgd_longer": "DP-SGD, LoRA, four epochs",
    "chain_kps_aug_pe": "DP-KPS, then Aug-PE",
    "chain_kps_private_prediction": "DP-KPS, then private prediction",
    "chain_kps_dp_sgd": "DP-KPS, then DP-SGD",
    "chain_topics_aug_pe": "topics, then Aug-PE",
}
FLOOR = 0.001
"""At this epsilon next to nothing of the private texts comes through: such a run shows what the
model and the public texts in its prompts make by themselves."""

NO_FLOOR = ("dp_sgd",)
"""The methods whose plans cannot be made there."""

WITHOUT_NOISE = ("aug_pe", "dp_sgd")
"""The methods that take an infinite epsilon."""

CLIPS = (10.0, 7.0, 5.0, 3.0, 2.0, 1.5, 1.0, 0.7, 0.5, 0.3, 0.2, 0.02, 0.002)
"""c: the largest one that epsilon pays all texts with."""

EXAMPLES = 40
"""Public texts of a label in the prompts of Aug-PE."""

ENDPOINT = "http://127.0.0.1:8000"
COST = "cost.json"


LEGEND = f"""\
Mean and deviation over runs that owe each other nothing (their number in brackets). Accuracy: a
logistic regression on MiniLM embeddings, trained on what the run released, tested on {{tests:,}}
real test texts; by label, the mean of the labels' accuracies, by a regression to which all labels
matter equally. Distance: Fréchet distance of the embeddings of {A_SIDE} released texts to those of
{A_SIDE} test texts, and MAUVE of the same. Eps {FLOOR:g}: the floor, as next to nothing of the
private texts comes through. Copies: released texts that share {COPIED} words in a row with a public
text, which prompts may show, and with a private one. Membership: AUC of telling private records
from test texts by the nearest released text (0.5 is chance). Parses: texts that are one JSON
record, where the data is. CPU: minutes of one core for a run.
"""

READING = """\
One run a row: differences of a few hundredths may be chance.

- With public texts in the prompts the floor is high, and on AG News nothing is above it by a tenth.
  SmolLM2 writes little of use without examples, so the prompts show public texts of the label,
  which are free, and these carry what the texts teach a classifier. At its floor private prediction
  is as accurate as at epsilon 1. Aug-PE and DP-KPS gain some hundredths over theirs, and more
  epsilon than 1 adds nothing.
- Without public texts in its prompts private prediction teaches 0.55 at the floor and 0.75 at
  epsilon 1 (AG News): the difference comes from the private records. On Yelp it is 0.29 and 0.32 by
  label, which may be chance. Its texts stay on the topic
  and far from the real texts' style (distance, MAUVE). Batches are of 16; larger ones were not
  tried.
- One epoch of DP-SGD, 20 steps of 200 records, teaches adapters on all layers a part of the topics
  (0.61, where a guess is 0.25), and on Yelp none of the categories (0.17 by label, where a guess is
  0.10 and floors are 0.24 to 0.29), but the look of reviews (MAUVE). Four epochs teach the look of
  the news (MAUVE 0.99 instead of 0.63) and hardly more of the topics (0.64), for three times the
  CPU. Terms of DP-KPS as control codes teach the topics in one epoch (0.78), and the look, too
  (0.95).
- A chain is no better than the best single method by more than chance. With terms of DP-KPS or of
  topics in its prompts Aug-PE is at 0.84 and 0.83, as it is by itself, and private prediction stays
  at its floor (0.82). What gains is DP-SGD (above), which by itself is the weakest here.
- On Yelp, 100 texts teach the usual regression the most frequent label alone, and so do 80 real
  records: the accuracy is that label's share. Where all labels matter equally (by label), DP-KPS is
  above its floor from epsilon 4 on. Aug-PE is at 0.34 and 0.33 at epsilons 1 and 4, and its floor
  at 0.24; private prediction at 0.34 and 0.33, and its floor at 0.29. 80 real records have 0.35.
- Of 77 intents, 100 texts hold one or two examples each: on BANKING77 accuracies are low for
  everybody. Aug-PE has 0.22 there, and 0.57 by label, more than 80 real records (0.13 and 0.40);
  how much of it comes from the public texts in its prompts is not known: its floor was not run.
  DP-KPS is above its floor by 0.02, which may be chance.
- On the abstracts (pubmed), which have no labels, Aug-PE's MAUVE is that of real texts (0.99), and
  its distance is not (0.83 instead of 0.77); its floor was not run. DP-KPS is not above its floor
  there, and 6 % of its texts share eight words in a row with a private one, the most in these
  tables.
- Of SmolLM2's JSON records (wikimovies) 47 to 58 % parse at epsilon 4: most of the others stop
  inside a list that never closes.
- Many texts of Aug-PE and DP-KPS on AG News repeat a public one for eight words or more, and few of
  private prediction, where `longest_copy` bars a seventh token in a row. Whoever may not pass the
  public texts on should not show them to the model, or bar copies.
- Where membership was measured, a release tells members from others no better than chance.
- Not run with this model: Aug-PE and DP-SGD without noise, a second run of a row, and every set and
  row that is not in the tables. CPU minutes are of machines with other work beside it, and those of
  later rows (DP-SGD, chains, Yelp) of one thread, which wastes less of it than two.
"""


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
        return self.method.removesuffix("_bare").removesuffix("_longer")

    @property
    def section(self) -> str:
        """Return the section with the settings of the method that makes the texts."""
        return "methods.1" if self.method.startswith("chain_") else "method"

    @property
    def kept(self) -> Path:
        """The file of its figures, which is committed."""
        return HERE / "measured" / "smollm2" / self.data / f"{self.folder.name}.json"


def cells(data: str, method: str) -> list[Cell]:
    about = SETS[data]
    if method in about.left_out:
        return []
    if method in VARIANTS:
        return [Cell(data, method, 4.0, 0)]
    floor = [] if method in NO_FLOOR else [FLOOR]
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
    if cell.method == "private_prediction_bare":
        found += ["method.few_shot=null", "method.longest_copy=null"]
    if cell.method.endswith(("private_prediction", "dp_kps")):
        found.append(f"{cell.section}.few_shot={short_public_texts(cell.data)}")
    if cell.method.startswith("chain_topics"):
        found.append(f"methods.0.public={part(cell.data, 'public')}")
    if cell.method == "dp_sgd_longer":
        found.append("method.epochs=4")
    if cell.file.endswith("dp_sgd") and shares:
        found.append(f"{cell.section}.control_columns.label={about.control}")
    if cell.method.endswith("aug_pe"):
        found.append(f"{cell.section}.template={prompts_with_examples(cell)}")
    elif (prompt := prompts(cell)).exists():
        found.append(f"{cell.section}.template={prompt}")
    if cell.file.endswith("private_prediction"):
        found.append(f"{cell.section}.clip_bound={largest_clip(cell, found)}")
    return found


def largest_clip(cell: Cell, settings: list[str]) -> float:
    file = HERE / "smollm2" / f"{cell.file}.yaml"
    for clip in CLIPS:
        key = f"{cell.section}.clip_bound"
        tried = [*settings, f"privacy.epsilon={cell.epsilon}", f"{key}={clip}"]
        with suppress(InputError):
            plan(load_config(file, tried))
            return clip
    raise SystemExit(f"no clip affords the texts at eps {cell.epsilon:g}")


def prompts(cell: Cell) -> Path:
    return HERE / "smollm2" / "prompts" / f"{cell.data}_{cell.file}.yaml"


def prompts_with_examples(cell: Cell) -> Path:
    """Write the prompts of Aug-PE with public texts of each label, one of which every request for a
    random text shows; return the file."""
    texts: dict[str, list[str]] = {label: [] for label in labels(cell.data) or ("",)}
    for row in rows(part(cell.data, "public")):
        of_label = texts[row["label"] or ""]
        if len(of_label) < EXAMPLES and is_short(row["text"]):
            of_label.append(" ".join(row["text"].split()))
    template = yaml.safe_load(prompts(cell).read_text())
    path = RUNS / "smollm2" / "prompts" / prompts(cell).name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(template | {"keywords": texts}, allow_unicode=True))
    return path


def run(cell: Cell, server: psutil.Process | None = None) -> None:
    """Make the run, and write the CPU time that it and the endpoint took beside it."""
    before = cpu_seconds(server)
    make(f"smollm2/{cell.file}", cell.folder, cell.epsilon, changes(cell))
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


def table(data: str) -> list[str]:
    """The section of the page; empty where no run was measured."""
    found: dict[tuple[str, float], list[Figures]] = {}
    for method in METHODS:
        for cell in cells(data, method):
            if cell.kept.exists():
                kept = json.loads(cell.kept.read_text())
                found.setdefault((method, cell.epsilon), []).append(kept["figures"])
    if not found:
        return []
    real = Yardstick(data)
    lines = [
        f"## SmolLM2-135M, four methods: {data}, {size(data):,} private records",
        "",
        f"`python experiments/four_methods.py {data}`; settings in experiments/smollm2. "
        + " ".join(LEGEND.format(tests=len(real.test.labels)).split()),
        "",
        "| method | eps | texts | accuracy | by label | distance | MAUVE | copies, public "
        "| private | membership | parses | CPU |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (method, epsilon), runs in found.items():
        texts = sorted({f"{figures['texts']}" for figures in runs}, key=int)
        line = [METHODS[method], f"{epsilon:g}", " to ".join(texts)]
        lines.append("| " + " | ".join([*line, *in_words(runs)]) + " |")
    for name in ("public", "private"):
        records = embedded(part(data, name))
        few = [real.of_vectors(draw(records, A_SIDE, seed)) for seed in range(RUNS_OF_EACH)]
        lines.append("| " + " | ".join([f"{name} records", "", f"{A_SIDE}", *in_words(few)]) + " |")
    return lines


def in_words(runs: Sequence[Figures]) -> list[str]:
    """The columns from accuracy on; empty where there is no figure."""

    def values(name: str) -> list[float]:
        return [value for figures in runs if (value := figures.get(name)) is not None]

    def mean(name: str, form: str) -> str:
        return f"{np.mean(found):{form}}" if (found := values(name)) else ""

    return [
        *(
            spread(values(name)) if values(name) else ""
            for name in ("accuracy", "by_label", "distance", "mauve")
        ),
        mean("copies_public", ".0%"),
        mean("copies_private", ".0%"),
        mean("membership", ".3f"),
        mean("parses", ".0%"),
        mean("cpu_minutes", ".0f"),
    ]


def samples(data: str) -> list[str]:
    """The section with texts that each method released, at epsilon 4 if there is such a run."""
    lines: list[str] = []
    for method, name in METHODS.items():
        for epsilon in (4.0, 1.0):
            if (kept := Cell(data, method, epsilon, 0).kept).exists():
                texts = json.loads(kept.read_text())["samples"]
                if texts:
                    lines += ["", f"{name}, eps {epsilon:g}:", "", *(f"1. {t}" for t in texts)]
                break
    if not lines:
        return []
    mean = np.mean([len(text.split()) for text in Yardstick(data).private])
    return [
        f"## SmolLM2-135M, {SAMPLES} texts a method: {data}",
        "",
        f"{SAMPLES} of each release of the table above, at equal distances in its file, as they "
        f"are. A real text has {mean:.0f} words on average.",
        *lines,
    ]


def measure(cell: Cell) -> None:
    """Write what the run is worth to a file that is kept."""
    records, yardstick = released(cell.folder), Yardstick(cell.data)
    cost = json.loads((cell.folder / COST).read_text())
    figures = yardstick.of_release(records) | {"cpu_minutes": cost["cpu_seconds"] / 60}
    rounded = {name: value and round(value, 4) for name, value in figures.items()}
    kept = {"figures": rounded, "samples": yardstick.samples(records)}
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
            with endpoint() if cell.method == "aug_pe" else nullcontext() as server:
                run(cell, server)
        measure(cell)


if __name__ == "__main__":
    main(sys.argv[1:])
