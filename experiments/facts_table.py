"""New facts for results_tables.md: how many a release states, and how many a reader of it knows.

`python experiments/facts_table.py METHOD...` makes the runs that are not there yet, METHOD a key of
METHODS, or with one epsilon, as in `kps@4`, and keeps their figures in experiments/measured: delete
a file there to measure anew. `python experiments/facts.py` makes the data before. Aug-PE wants the
endpoint of `dpray serve experiments/serve.yaml`.

A chained method spends half of epsilon on DP-KPS, whose sequences hold the names of the companies.
With these, every record is labelled by the fact that it is about; the other half of epsilon goes to
a method with these labels.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from facts import (
    ENTITIES,
    FOLDER,
    RARE,
    RECORDS_OF_A_FACT,
    SCHEMA,
    WRONG_ANSWERS,
    by_fact,
    fact_label,
    found_names,
    read,
    read_questions,
    stated,
    write,
)
from facts_reader import SHOWN, answered
from runs import HERE, RUNS, finished, make, released

EPSILONS = (1.0, 4.0, 8.0, inf)


class Method(NamedTuple):
    name: str
    file: str
    chained: bool = False
    without_noise: bool = True
    """Whether the method takes an infinite epsilon."""

    rare: bool = False
    """DP-KPS counts only words that few public records hold, and at most two of a record."""


METHODS = {
    "kps": Method("DP-KPS, the sequences alone", "facts_kps", without_noise=False),
    "secret": Method(
        "private prediction, secret batches, SmolLM2", "facts_secret", without_noise=False
    ),
    "aug_pe": Method("Aug-PE", "facts_aug_pe"),
    "sgd": Method("DP-SGD, LoRA", "facts_sgd"),
    "kps_kps": Method("DP-KPS, then DP-KPS by fact", "facts_kps", True, False),
    "kps_kps_rare": Method(
        "DP-KPS, then DP-KPS by fact; rare words, S = 2", "facts_kps", True, False, True
    ),
    "kps_secret": Method("DP-KPS, then secret batches by fact", "facts_secret", True, False),
    "kps_sgd": Method("DP-KPS, then DP-SGD by fact", "facts_sgd", True),
}
ALMOST_NONE = 100.0
CLIPS = {1.0: 1.0, 4.0: 2.0, 8.0: 3.0}
"""c: half of epsilon pays for a text of each fact."""

KEPT = HERE / "measured" / "facts"
RECORDS = {
    "the real private records (ceiling)": "real",
    "no record (floor)": "none",
}
"""Rows that need no run, and the files of their figures."""

READING = """\
- Facts come through where a method counts words: by DP-KPS, chained with itself so that the names
  become labels, 98 to 100 % are stated from epsilon 4 on, and 12 % at epsilon 1; with rare words
  98 % at epsilon 1, too. A reader of the sequences with rare words answers as well as one of the
  real records.
- All other runs state three of the 60 facts at most, which is chance, and their readers are little
  better than chance: which company has which answer is lost.
"""

RARE_WORDS = [f"method.vocabulary={FOLDER}/rare.txt", "method.phrases_per_record=2"]


def folder(method: str, epsilon: float) -> Path:
    return RUNS / "facts" / f"{method}-{epsilon:g}"


def kept(name: str) -> Path:
    """The file of figures that are committed: a run folder's, or one of RECORDS."""
    return KEPT / f"{name}.json"


def keep(name: str, figures: dict[str, float]) -> None:
    KEPT.mkdir(parents=True, exist_ok=True)
    kept(name).write_text(json.dumps(figures, indent=1) + "\n")


def figures(name: str) -> dict[str, float] | None:
    return json.loads(kept(name).read_text()) if kept(name).exists() else None


def run(method: str, epsilon: float) -> None:
    """Make a run and keep its figures; the names of the first run of a chain are kept with it."""
    about, out = METHODS[method], folder(method, epsilon)
    if kept(out.name).exists() or (epsilon == inf and not about.without_noise):
        return
    if not finished(out):
        make_run(about, out, epsilon)
    keep(out.name, shares(released(out)))


def make_run(about: Method, out: Path, epsilon: float) -> None:
    changes = list(RARE_WORDS) if about.rare else []
    if about.file == "facts_secret":
        changes.append(f"method.clip_bound={CLIPS[epsilon]}")
    if about.chained:
        changes += by_fact_changes(about, epsilon)
    make(about.file, out, epsilon / (1 + about.chained), changes)


def first_run(epsilon: float, rare: bool = False) -> Path:
    return folder("names_rare" if rare else "names", epsilon)


def by_fact_changes(about: Method, epsilon: float) -> list[str]:
    """Have the records labelled by what a first run found. DP-KPS always has noise, but little
    before a run without."""
    if not finished(first := first_run(epsilon, about.rare)):
        make("facts_kps", first, min(epsilon, ALMOST_NONE) / 2, RARE_WORDS if about.rare else [])
    entities = names_of(first)
    known = {question.entity for question in read_questions()}
    keep(first.name, {"names": len(known & set(entities))})
    path = FOLDER / f"by_fact-{first.name}.jsonl"
    write(path, by_fact(read("private.jsonl"), entities))
    labels = [fact_label(entity, attribute) for entity in entities for attribute in SCHEMA]
    changes = [f"data.path={path}", f"data.labels=[{', '.join(labels)}]"]
    if about.file == "facts_kps":
        changes.append("method.contrast=1.0")
    if about.file == "facts_secret":
        changes.append(f"method.template={template_of(entities)}")
    return changes


def template_of(entities: Sequence[str]) -> Path:
    """Write the prompts for records labelled by the fact: they name the company alone, with which
    the answer begins. Return the file."""
    template = yaml.safe_load((HERE / "facts.template.yaml").read_text())
    names = {fact_label(entity, attribute): entity for entity in entities for attribute in SCHEMA}
    path = FOLDER / "by_fact.template.yaml"
    path.write_text(yaml.safe_dump(template | {"prefix": "{label}", "labels": names}))
    return path


def names_of(first: Path) -> list[str]:
    """Return the names in a release; that there are ENTITIES companies is public."""
    return found_names((row["text"] for row in released(first)), ENTITIES)


def table() -> list[str]:
    """The section of the page, of the figures that are kept."""
    facts = ENTITIES * len(SCHEMA)
    found, found_rare = (
        {
            f"{eps:g}": f"{names['names']}"
            for eps in EPSILONS
            if (names := figures(first_run(eps, rare).name))
        }
        for rare in (False, True)
    )
    lines = [
        f"## New facts: {facts} facts of {ENTITIES} companies that do not exist, "
        f"{facts * RECORDS_OF_A_FACT:,} private records",
        "",
        f"After ContinuousBench (arXiv 2606.01849): {RECORDS_OF_A_FACT} records a fact "
        "(`python experiments/facts.py`), runs by `python experiments/facts_table.py "
        f"{' '.join(METHODS)}`. The cells are stated / answered, one run each. Stated: facts whose "
        "company and right answer stand together in more released records than the company and the "
        "answer of any one other company. Answered: questions for which SmolLM2-135M prefers "
        f"the right one of {WRONG_ANSWERS + 1} answers after it has read {SHOWN} released records "
        "on that attribute of the company. Delta is 1e-6, and 0 for DP-KPS; DP-KPS and private "
        "prediction do not run without noise.",
        "",
        "Public are the schema with lists of possible answers, the number of companies, and the "
        "syllables of names: the vocabulary of DP-KPS lists every name that these can make. With "
        "the attributes as labels a release holds names and answers, but not which belong "
        'together. Where a row says "then", a run of DP-KPS spends half of epsilon to find the '
        "names, every private record is labelled by company and attribute, and a second run with "
        "these labels spends the other half, which adds to the first. Rare words: DP-KPS counts "
        f"only words that at most {RARE:.0%} of public records hold, and two of a record, so that "
        f"its noise is smaller. At eps {', '.join(found)} of both halves the first run found "
        f"{', '.join(found.values())} of {ENTITIES} names; with rare words "
        f"{', '.join(found_rare.values())}.",
        "",
        "| | " + " | ".join(f"eps {epsilon:g}" for epsilon in EPSILONS) + " |",
        "|---|" + "---|" * len(EPSILONS),
    ]
    for method, about in METHODS.items():
        cells = []
        for epsilon in EPSILONS:
            missing = "not run" if epsilon < inf or about.without_noise else ""
            cells.append(in_words(figures(folder(method, epsilon).name)) or missing)
        lines.append(f"| {about.name} | " + " | ".join(cells) + " |")
    empty = " |" * (len(EPSILONS) - 1)
    lines += [f"| {row} | {in_words(figures(name))} |{empty}" for row, name in RECORDS.items()]
    chance = {"stated": 1 / ENTITIES, "answered": 1 / (1 + WRONG_ANSWERS)}
    return [*lines, f"| chance | {in_words(chance)} |{empty}", "", *READING.splitlines()]


def shares(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the shares of facts stated and of questions answered."""
    questions = read_questions()
    return {
        "stated": sum(stated(records, questions)) / len(questions),
        "answered": sum(answered(records, questions)) / len(questions),
    }


def in_words(found: dict[str, float] | None) -> str:
    return f"{found['stated']:.0%} / {found['answered']:.0%}" if found else ""


if __name__ == "__main__":
    for name, records in (("real", read("private.jsonl")), ("none", [])):
        if not kept(name).exists():
            keep(name, shares(records))
    for wanted in sys.argv[1:]:
        wanted_method, _, only = wanted.partition("@")
        for eps in [float(only)] if only else EPSILONS:
            run(wanted_method, eps)
