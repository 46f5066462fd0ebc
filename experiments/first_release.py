"""First releases as `dpray init` writes them, with and without a sentence about the texts.

`python experiments/first_release.py SET[/METHOD]...` makes the runs that are not there yet, and
keeps their figures in experiments/measured/first_release. Every configuration is the one that
`dpray init` writes at epsilon 4 with SmolLM2-135M, but for the number of texts. The floor are texts
of `dpray preview`, and `real` are other private records.

Texts in other languages come from GitHub, the files into `SOURCES`: uds-lsv/GermEval-2018-Data at
9877472d (germeval2018.training.txt, CC BY 4.0; the tweets that nobody finds offensive), and
649453932/Chinese-Text-Classification-Pytorch at 6cb26819 (THUCNews/data/test.txt, MIT; headlines).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from embedding import embed
from four_methods_picture import INK, MUTED, PAPER, picture
from runs import DATA, HERE, RUNS, accuracy, as_embedded, finished, rows

from dpray.engines.sentences import sentence_ends
from dpray.evaluation.fidelity import frechet_distance, mauve

KEPT = HERE / "measured" / "first_release"
PICTURE = HERE.parent / "docs" / "results_first_release.svg"
FILES = RUNS / "first_release"
SOURCES = FILES / "sources"
MOST_LABELS = 8
"""The most common labels of a set are released, with their records."""
EXAMPLES, LONGEST_EXAMPLE = 5, 160
METHODS = {
    "private_prediction": "private prediction",
    "aug_pe": "Aug-PE",
    "dp_kps": "DP-KPS",
    "dp_sgd": "DP-SGD",
}
QUICK_TEXTS = 40
WAYS = {"bare": "before", "floor": "floor", "about": "after", "real": "real"}
BEFORE = {
    "private_prediction": ("method.stop=[]", "method.schema=null", "method.end_tokens=0"),
    "aug_pe": ("method.temperature=1.2", "method.top_p=1"),
    "dp_kps": ("method.generation_temperature=1", "method.generation_top_p=1",
               "method.phrases_per_record=10"),
    "dp_sgd": ("method.learning_rate=1e-4", "method.batch_size={quarter}"),
}  # fmt: skip
"""The keys that `dpray init` wrote in the runs "before"."""
LOOKS: Mapping[str, Any] = {
    "bare": {"marker": "o", "color": INK, "markerfacecolor": PAPER},
    "floor": {"marker": "|", "color": MUTED, "markersize": 9},
    "about": {"marker": "o", "color": INK},
    "real": {"marker": "D", "color": MUTED, "markersize": 4},
}

Row = dict[str, Any]


class Data(NamedTuple):
    """`texts` are of methods that take long on a CPU; DP-KPS and DP-SGD write `QUICK_TEXTS`."""

    title: str
    about: str
    texts: int = 20
    label_about: Mapping[str, str] = {}
    language: str = ""
    columns: Sequence[str] = ("text",)


SETS = {
    "banking77": Data("BANKING77 (8 intents)", "questions that customers ask their bank", 40),
    "agnews": Data("AG News", "first paragraphs of news articles", 10),
    "yelp": Data("Yelp", "reviews of local businesses by their customers", 10),
    "trec": Data("TREC", "short questions about facts"),
    "pubmed": Data("PubMed abstracts", "abstracts of medical articles", 10),
    "mts_dialog": Data(
        "clinical notes", "sections of notes that doctors write after a visit", 10,
        {"GENHX": "history of the present illness", "FAM/SOCHX": "family and social history",
         "PASTMEDICALHX": "past medical history", "CC": "chief complaint",
         "PASTSURGICAL": "past surgical history", "ALLERGY": "allergies",
         "ROS": "review of systems", "MEDICATIONS": "medications"},
    ),
    "wikimovies": Data(
        "films (a table)", "records of films", 10, columns=("title", "year", "genres")
    ),
    "german": Data("German tweets", "tweets about politics", language="German"),
    "chinese": Data(
        "Chinese headlines", "headlines of news", 10, language="Chinese",
        label_about={"0": "finance", "1": "real estate", "2": "stocks", "3": "education",
                     "4": "science", "5": "society", "6": "politics", "7": "sports",
                     "8": "games", "9": "entertainment"},
    ),
}  # fmt: skip


@cache
def parts(data: str) -> tuple[list[Row], list[Row], list[str]]:
    """Return a set's private and test records, and its labels. A table's text is a JSON object."""
    names = SETS[data].columns
    if data in ("german", "chinese"):  # their files are in the order of time, or of labels
        file = SOURCES / ("test.txt" if data == "chinese" else "germeval2018.training.txt")
        lines = [line.split("\t") for line in file.read_text().splitlines()]
        found: list[Row] = [{"text": t, "label": k} for t, k, *_ in lines if k != "OFFENSE"]
        private, test = [row for i, row in enumerate(found) if i % 4], found[::4]
    else:
        private, test = (rows(DATA / data / f"{name}.jsonl") for name in ("private", "test"))
    for row in (*private, *test):
        if len(names) > 1:
            row["text"] = json.dumps({name: row[name] for name in names}, ensure_ascii=False)
        if len(names) > 1 or data == "german":
            row["label"] = None
    counts = Counter(row["label"] for row in private if row["label"] is not None)
    labels = sorted(sorted(counts, key=counts.__getitem__)[-MOST_LABELS:])
    if labels:
        private, test = ([r for r in part if r["label"] in labels] for part in (private, test))
    return private, test, labels


def configured(data: str, method: str, says: bool) -> tuple[Path, Path]:
    """Write a configuration by `dpray init`; return it and the folder of its release."""
    (private, _, labels), of = parts(data), SETS[data]
    FILES.mkdir(parents=True, exist_ok=True)
    file, out = FILES / f"{data}.jsonl", FILES / f"{data}-{method}-{'about' if says else 'bare'}"
    names = [*of.columns, "label"]
    file.write_text("".join(json.dumps({n: row[n] for n in names}) + "\n" for row in private))
    options = ["--label", "label", "--labels", ",".join(map(json.dumps, labels))] if labels else []
    if says:
        known = {label: of.label_about[label] for label in labels if label in of.label_about}
        options += ["--about", of.about]
        options += ["--label-about", json.dumps(known)] if known else []
    if of.language and (says or method == "dp_kps"):  # whose words are those of a language
        options += ["--language", of.language]
    elif method == "dp_kps":
        options += ["--vocabulary", str(DATA / "vocab" / "public_unigrams.tsv")]
    config, size = out.with_suffix(".yaml"), str(round(len(private), -2))
    dpray("init", str(file), "-o", str(config), "--force", "--text", ",".join(of.columns),
          "--no-unit", "--public-size", size, "--epsilon", "4", "--method", method, "--model",
          "smollm2", "--dataset", out.name, "--out", str(out), *options)  # fmt: skip
    return config, out


def dpray(*command: str) -> None:
    subprocess.run([sys.executable, "-m", "dpray", *command], check=True)


def figures(records: Sequence[Row], test: Sequence[Row]) -> dict[str, float | None]:
    """Return the distances of records to test records, the accuracy of what a classifier learns of
    them, and the share that `max_tokens` cut in a sentence."""
    records = [row for row in records if row["text"]]
    made, real = as_embedded(records, embed), as_embedded(test, embed)
    full = [row["text"] for row in records if row.get("finish_reason") == "length"]
    # A record of a table that its schema closed is whole.
    whole = (text for text in full if text.endswith("}") or len(text) in sentence_ends(f"{text} "))
    cut = len(full) - sum(1 for _ in whole)
    return {
        "texts": len(records),
        "frechet": frechet_distance(made.vectors, real.vectors),
        "mauve": mauve(made.vectors, real.vectors[: len(records)], 0),
        "accuracy": accuracy(made, real) if len({*made.labels}) > 1 else None,
        "full": len(full) / len(records),
        "cut": cut / len(records),
    }


def measure(data: str, method: str) -> None:
    """Make the runs of a set and a method that are not there, and keep their figures."""
    private, test, _ = parts(data)
    number = QUICK_TEXTS if method in ("dp_kps", "dp_sgd") else SETS[data].texts
    asked = f"method.{'max_' if method == 'private_prediction' else ''}records={number}"
    found: dict[str, Any] = {}
    for way in ("about", "bare"):
        config, out = configured(data, method, way == "about")
        quarter = round(len(private), -2) // 4
        old = [k.format(quarter=quarter) for k in BEFORE.get(method, ())] if way == "bare" else ()
        if not finished(out):
            dpray("run", str(config), asked, f"privacy.ledger=sqlite:///{out}.db", *old)
        records, floor = rows(out / "synthetic.jsonl"), out / "floor.jsonl"
        found[way] = figures(records, test[:400])
        if way == "about":
            if not floor.exists():
                floors = "engine.kind=transformers"  # loads faster
                dpray("preview", str(config), asked, floors, "--records", str(number), "--write")
            found["floor"] = figures(rows(floor)[: len(records)], test[:400])
            found["real"] = figures(private[: len(records)], test[:400])
            some = records[:: max(1, len(records) // EXAMPLES)][:EXAMPLES]
            found["examples"] = [" ".join(row["text"].split())[:LONGEST_EXAMPLE] for row in some]
    KEPT.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found, indent=1, ensure_ascii=False)
    (KEPT / f"{data}-{method}.json").write_text(f"{text}\n")


def kept(method: str) -> dict[str, dict[str, Any]]:
    """Return the figures of a method's sets."""
    files = {data: KEPT / f"{data}-{method}.json" for data in SETS}
    return {data: json.loads(file.read_text()) for data, file in files.items() if file.exists()}


def closed(found: Mapping[str, Any]) -> float:
    """Return the part of the distance between today's default and real records that is closed."""
    before, after, real = (found[way]["frechet"] for way in ("bare", "about", "real"))
    return float((before - after) / (before - real))


def draw() -> None:
    """Draw the distances of each set before and after."""
    methods = [method for method in METHODS if len(kept(method)) > 1]
    with picture(PICTURE, 9.5, 0.3 * len(SETS) + 1.2) as figure:
        axes = figure.subplots(1, len(methods), sharey=True, squeeze=False)[0]
        for panel, method in zip(axes, methods, strict=True):
            for data, found in kept(method).items():
                at, place = {way: found[way]["frechet"] for way in WAYS}, [*SETS].index(data)
                panel.plot([at["bare"], at["about"]], [place] * 2, color=INK, linewidth=1)
                for way, look in LOOKS.items():
                    panel.plot(at[way], place, linestyle="none", label=WAYS[way], **look)
            panel.set_title(METHODS[method], fontsize=9)
            panel.set_xlabel("distance to real texts", fontsize=9)
            panel.grid(axis="x", color=MUTED, alpha=0.2)
        axes[0].set_yticks(range(len(SETS)), [of.title for of in SETS.values()])
        axes[0].set_ylim(len(SETS) - 0.5, -0.5)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles[:4], labels[:4], loc="outside lower center", ncols=4, frameon=False)


def line(data: str, method: str, found: Mapping[str, Any]) -> str:
    cells = [SETS[data].title, METHODS[method], str(found["about"]["texts"])]
    for of in (found[way] for way in WAYS):
        learned = "" if of.get("accuracy") is None else f", {of['accuracy']:.2f}"
        cells.append(f"{of['frechet']:.2f}, {of['mauve']:.2f}{learned}")
    cut = ", ".join(f"{found[w]['cut']:.0%}" for w in ("bare", "about") if "cut" in found[w])
    return f"| {' | '.join([*cells, f'{closed(found):.0%}', cut])} |"


def missing() -> str:
    """Return what was not run, in words."""
    words = []
    for method, name in METHODS.items():
        if left := [of.title for data, of in SETS.items() if data not in kept(method)]:
            words.append(f"{name} on {', '.join(left)}")
    return f"Not run: {'; '.join(words)}." if words else ""


def halves() -> str:
    """Return on how many sets each method closes half of the gap, in words."""
    found = {name: [*kept(method).values()] for method, name in METHODS.items()}
    return ", ".join(
        f"{name} on {sum(closed(each) >= 0.5 for each in runs)} of {len(runs)}"
        for name, runs in found.items()
        if runs
    )


def chosen(method: str) -> list[str]:
    """Return texts of a method's first sets, chosen by position."""
    texts = [
        f"- {SETS[data].title}: {found['examples'][place % len(found['examples'])]}"
        for place, (data, found) in enumerate([*kept(method).items()][:EXAMPLES])
    ]
    return ["", f"Texts of {METHODS[method]}, chosen by position:", "", *texts]


def section() -> list[str]:
    """Draw the picture; return the section of docs/results.md."""
    draw()
    found = [each for method in METHODS for each in kept(method).values()]
    texts = sum(each["about"]["texts"] for each in found)
    cut = sum(round(each["about"]["cut"] * each["about"]["texts"]) for each in found)
    return [
        "## First releases",
        "",
        f"![Distances of first releases to real texts, before and after]({PICTURE.name})",
        "",
        "Configurations are those of `dpray init` at epsilon 4, with SmolLM2-135M, one run each. "
        "Before: the configuration says nothing about the texts, and has older values of the keys "
        "below. After: `--about`, `--label-about` and `--language` are given, and the keys are "
        "those that `init` writes. In private prediction, texts then end at a blank line, the "
        "public prompt ends a sentence that was cut (only in the runs of PubMed, clinical notes, "
        "German and Chinese), and a table has a schema. Aug-PE has a temperature of 0.8 in place "
        "of 1.2. DP-KPS counts 3 terms of a record in place of 10, at a temperature of 0.8 in "
        "place of 1. The answers of these two begin with `Text:`. DP-SGD makes some 32 steps in "
        "all in place of 4 a pass, at a learning rate of 0.005 (on BANKING77 0.002) in place of "
        "0.0001. The floor is texts of `dpray preview`, for DP-KPS with random words of the public "
        "list. Real is as many private records. Each cell has the Fréchet distance to test texts "
        "(less is better), MAUVE (more is better), and the accuracy of a classifier that learns "
        "the labels from these texts. So "
        "few texts measure them only roughly, and the embedder knows English only. Cut: the share "
        "of texts cut in a sentence, before and after (`python experiments/first_release.py "
        "SET[/METHOD]...`).",
        "",
        f"| set | method | texts | {' | '.join(WAYS.values())} | gap closed | cut |",
        f"|---|---|---|{'---|' * len(WAYS)}---|---|",
        *(line(data, method, each) for method in METHODS for data, each in kept(method).items()),
        "",
        "The target was to close half of the gap between before and real on six of eight sets, and "
        f"to cut no text. Half of it is closed by {halves()} sets, and {cut} of {texts} texts are "
        f"cut. {missing()}",
        *(line for method in METHODS for line in chosen(method)),
    ]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        data, _, method = name.partition("/")
        measure(data, method or "private_prediction")
