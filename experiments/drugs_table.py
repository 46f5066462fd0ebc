"""New facts in sentences: which way of ending in fluent text states them.

`python experiments/drugs_table.py WAY@EPSILON[/NOTES[/DRUGS]][#RUN]...` makes the runs that are not
there yet, WAY a key of WAYS, NOTES those of a fact (333) and DRUGS the private ones (100), RUN a
number from 0 on, and keeps their figures in experiments/measured/drugs: delete a file there to
measure anew.

Every way begins with a run of DP-KPS that finds the names, for a quarter of epsilon. All other runs
name them in labels or prompts. The costs of the runs of a way add up to epsilon.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import yaml
from drugs import (
    SCHEMA,
    Fact,
    World,
    by_fact,
    fact_label,
    found_names,
    make_data,
    sentences,
    statements,
    world,
    write,
)
from drugs_score import score
from runs import HERE, RUNS, finished, make, released, rows

NOTES, DRUGS = 333, 100
TEXTS_OF_A_FACT = 2
SHOWN = 4
"""Public sentences that a prompt shows."""


class Case(NamedTuple):
    way: str
    epsilon: float
    notes: int = NOTES
    drugs: int = DRUGS
    run: int = 0

    @property
    def data(self) -> Path:
        return RUNS / "drugs" / f"{self.drugs}x{self.notes}"

    @property
    def name(self) -> str:
        return f"{self.way}-{self.epsilon:g}-{self.drugs}x{self.notes}-{self.run}"

    @property
    def kept(self) -> Path:
        return HERE / "measured" / "drugs" / f"{self.name}.json"

    def folder(self, part: str) -> Path:
        return self.data / f"{self.way if part == 'texts' else part}-{self.epsilon:g}-{self.run}"

    def file(self, name: str, ending: str) -> Path:
        """Return the place of a file that rests on the names that this run found."""
        return self.data / f"{name}-{self.epsilon:g}-{self.run}.{ending}"


class Drugs:
    """The files and the runs of a case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        if not (case.data / "private.jsonl").exists():
            make_data(case.data, case.drugs, case.notes)

    @cached_property
    def world(self) -> World:
        return world(self.case.drugs)

    @cached_property
    def names(self) -> list[str]:
        """The names that the first run found; that there are so many drugs is public."""
        size = 2 * (self.case.drugs + len(SCHEMA["condition"].values))
        changes = [
            f"data.path={self.case.data}/private.jsonl",
            f"method.vocabulary={self.case.data}/vocabulary.txt",
            f"method.vocabulary_size={size + self.case.drugs}",
            "method.phrases_per_record=2",
        ]
        out = self.run("names", "drugs_kps", 1 / 4, changes)
        return found_names((row["text"] for row in released(out)), self.case.drugs)

    @cached_property
    def labels(self) -> list[str]:
        return [fact_label(name, attribute) for name in self.names for attribute in SCHEMA]

    @cached_property
    def notes_by_fact(self) -> Path:
        path = self.case.file("by_fact", "jsonl")
        write(path, by_fact(rows(self.case.data / "private.jsonl"), self.names))
        return path

    @cached_property
    def examples(self) -> Path:
        """Public sentences of each attribute, with their value, for the labels of the private
        notes, which name the attribute too."""
        path = self.case.file("examples", "jsonl")
        of: dict[str, list[str]] = {attribute: [] for attribute in SCHEMA}
        for fact, sentence in self.public_sentences:
            if len(of[fact.attribute]) < 40:
                of[fact.attribute].append(f"Words: {fact.drug}, {fact.value}\nSentence: {sentence}")
        found = (
            {"text": text, "label": fact_label(name, attribute)}
            for name in self.names
            for attribute, texts in of.items()
            for text in texts
        )
        write(path, found)
        return path

    @cached_property
    def public_sentences(self) -> list[tuple[Fact, str]]:
        known = set(self.world.public)
        return [
            (fact, sentence)
            for row in rows(self.case.data / "public.jsonl")
            for sentence, fact in statements(row["text"])
            if fact in known
        ]

    @property
    def size(self) -> str:
        return f"data.public_size={self.case.notes * self.case.drugs * len(SCHEMA)}"

    def run(self, part: str, file: str, share: float, changes: Sequence[str]) -> Path:
        """Make a run for a share of epsilon, unless it is there."""
        out = self.case.folder(part)
        if not finished(out):
            make(file, out, self.case.epsilon * share, [self.size, *changes])
        return out

    def labelled(self) -> list[str]:
        """The settings of a run on notes that are labelled by their fact."""
        return [f"data.path={self.notes_by_fact}", f"data.labels={json.dumps(self.labels)}"]

    def template(self, name: str) -> str:
        """Write the prompts, which name a label's drug alone; return their file."""
        path = self.case.file(name, "template.yaml")
        template = yaml.safe_load((HERE / f"drugs_{name}.template.yaml").read_text())
        names = {fact_label(n, attribute): n for n in self.names for attribute in SCHEMA}
        path.write_text(yaml.safe_dump(template | {"labels": names}, allow_unicode=True))
        return f"method.template={path}"

    def values(self, part: str, share: float, *more: str) -> Path:
        """A run of DP-KPS that finds the value of each fact."""
        changes = [
            *self.labelled(),
            f"method.vocabulary={self.case.data}/values.txt",
            f"method.vocabulary_size={self.case.drugs + 2 * len(SCHEMA['effect'].values)}",
            "method.phrases_per_record=1",
            "method.sequence_length=1",
            "method.top_m=1",
            "method.contrast=1.0",
            f"method.records={TEXTS_OF_A_FACT * len(self.labels)}",
        ]
        return self.run(part, "drugs_kps", share, [*changes, *more])


ENGINE = {"kind": "vllm", "model": "smollm2", "dtype": "float32", "max_model_len": 512}
WRITTEN = (
    f"engine={json.dumps(ENGINE | {'kv_cache_gib': 2.0})}",
    "method.max_tokens=32",
    "method.label_in_prompt=true",
    "method.generation_temperature=0.3",
)


def words(drugs: Drugs) -> Path:
    return drugs.values("texts", 3 / 4, *WRITTEN, drugs.template("words"))


def words_shown(drugs: Drugs, *others: str) -> Path:
    more = [
        drugs.template("words_shown"),
        f"method.few_shot={drugs.examples}",
        f"method.few_shot_examples={SHOWN}",
    ]
    return drugs.values("texts", 3 / 4, *WRITTEN, *more, *others)


def words_checked(drugs: Drugs) -> Path:
    return words_shown(drugs, "method.least_terms=1", "method.max_retries=4")


def windows(drugs: Drugs) -> Path:
    """Sentences as terms: every one that the public forms make of the names and of the values that
    the first run found."""
    names = drugs.names
    known = {term for row in released(drugs.case.folder("names")) for term in row["terms"]}
    path = drugs.case.file("sentences", "txt")
    path.write_text("\n".join(sentences(names, sorted(known))))
    facts = len(drugs.labels)
    changes = [
        f"data.path={drugs.case.data}/private.jsonl",
        f"method.vocabulary={path}",
        "method.stop_words=keep",
        f"method.vocabulary_size={5 * facts}",
        "method.phrases_per_record=1",
        "method.sequence_length=1",
        f"method.records={TEXTS_OF_A_FACT * facts}",
    ]
    return drugs.run("texts", "drugs_kps", 3 / 4, changes)


class Way(NamedTuple):
    name: str
    run: Callable[[Drugs], Path]


BY_FACT = "DP-KPS by fact, a model writes:"
WAYS = {
    "words": Way(f"{BY_FACT} words alone in the prompts", words),
    "words_shown": Way(f"{BY_FACT} public sentences in the prompts", words_shown),
    "words_checked": Way(f"{BY_FACT} the same, with least_terms: 1", words_checked),
    "windows": Way("DP-KPS, whole sentences as terms", windows),
}


COLUMNS = {
    "stated": "stated",
    "stated_fluently": "in a fluent sentence",
    "false": "false",
    "silent": "silent",
    "answered": "answered",
}


def section() -> list[str]:
    """Return the section of the page, of the figures that are kept."""
    return [
        "## New facts, in sentences",
        "",
        "The records are notes about drugs that do not exist (`experiments/drugs.py` has their "
        "sentences). They say what each drug is given for, name a side effect, and give a code. "
        "Each fact is in 33 to 3,330 notes. These things are public: the forms of the sentences, "
        "the lists of conditions and effects, the form of codes, the syllables of names, the "
        "number of drugs and of notes, and notes about other drugs. It is also public that a note "
        "names one drug and one value of one subject, and that a drug has one value of each. "
        "Every way begins with a run of DP-KPS that finds the names, for a quarter of epsilon. "
        "For the ways by fact, each note is then labelled by its drug and subject; the subject is "
        "a column. A second run has three quarters of epsilon, and the two costs add up (delta 0; "
        "each run has a ledger of its own here). The command is `python "
        "experiments/drugs_table.py WAY@EPSILON`.",
        "",
        *table(),
        "",
        "A sentence states a fact if it names one drug and one value, whatever it says of them. "
        "Stated: facts whose value more sentences state than any other value. A sentence is "
        "fluent if it is whole and likelier, for SmolLM2, than the least likely 1 % of the real "
        "ones. False: fluent statements that are not true of the drug that they name. Silent: "
        "texts without a statement. Answered: questions with four choices for which SmolLM2 "
        "prefers the right one, after it has read at most two released texts on that subject of "
        "the drug. A guess is right in 25 %.",
    ]


def table() -> list[str]:
    """Return a row for each case whose figures are kept: of each figure the least and the most of
    the runs."""
    head = ["way", "eps", "records", "facts", "runs", "names found", "texts", *COLUMNS.values()]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for case, runs in kept_cases().items():
        facts = case.drugs * len(SCHEMA)
        about = [
            WAYS[case.way].name,
            f"{case.epsilon:g}",
            f"{facts * case.notes:,}",
            f"{facts:,}",
            f"{len(runs)}",
            spread(runs, "names", "{:.0%}"),
            spread(runs, "texts", "{:.0f}"),
        ]
        cells = [*about, *(spread(runs, column, "{:.0%}") for column in COLUMNS)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def spread(runs: Sequence[dict[str, float]], figure: str, form: str) -> str:
    """Return the least and the most of a figure, or one where they look alike."""
    values = [run[figure] for run in runs]
    return " to ".join(dict.fromkeys(form.format(value) for value in (min(values), max(values))))


def kept_cases() -> dict[Case, list[dict[str, float]]]:
    """Return the figures of the runs of each case, in the order of the ways."""
    found: dict[Case, list[dict[str, float]]] = {}
    for file in sorted((HERE / "measured" / "drugs").glob("*.json")):
        way, epsilon, size, _ = file.stem.rsplit("-", 3)
        drugs, notes = map(int, size.split("x"))
        figures = json.loads(file.read_text())["figures"]
        found.setdefault(Case(way, float(epsilon), notes, drugs), []).append(figures)
    ways = list(WAYS)
    order = sorted(found, key=lambda c: (-c.drugs, -c.notes, -c.epsilon, ways.index(c.way)))
    return {case: found[case] for case in order}


def main(wanted: Sequence[str]) -> None:
    for each in wanted:
        rest, _, run = each.partition("#")
        way, _, rest = rest.partition("@")
        epsilon, *sizes = rest.split("/")
        case = Case(way, float(epsilon), *map(int, sizes))._replace(run=int(run or 0))
        if case.kept.exists():
            continue
        drugs = Drugs(case)
        true = {fact.drug for fact in drugs.world.private}
        records = released(WAYS[way].run(drugs))
        found = score(drugs.world, case.data / "private.jsonl", records)
        found["names"] = len(true & set(drugs.names)) / len(true)
        samples = [row["text"] for row in records[:: max(1, len(records) // 6)][:6]]
        case.kept.parent.mkdir(parents=True, exist_ok=True)
        kept = {"figures": found, "samples": samples}
        case.kept.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
        print(case.name, found, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
