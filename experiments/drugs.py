"""Facts about drugs that do not exist, in notes of a clinic, after ContinuousBench (2026, arXiv
2606.01849).

`records(...)` writes, from one seed, private notes (for each fact as many, all different), and
public ones about other drugs. The sentences, the lists of conditions and effects, the form of a
code and the syllables of names are public, so that a vocabulary may list every name and value that
these can make. Which drugs there are, and what holds of them, only the private notes say.
"""

from __future__ import annotations

import json
import random
import re
from calendar import month_name
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

PUBLIC_DRUGS, PUBLIC_OF_A_FACT = 100, 10
WRONG_ANSWERS = 3
_SEED = 43


class Attribute(NamedTuple):
    question: str
    values: tuple[str, ...]
    sentences: tuple[str, ...]


class Fact(NamedTuple):
    drug: str
    attribute: str
    value: str


_WORDS = json.loads(Path(__file__).with_name("drugs_words.json").read_text())
_CODES = tuple(f"{letter}{number}" for letter in "BCDFGHJKLM" for number in range(100, 1000))

SCHEMA = {
    name: Attribute(
        each["question"], tuple(each["values"].split()) or _CODES, (*each["sentences"],)
    )
    for name, each in _WORDS["attributes"].items()
}
_OPENINGS, _CLOSINGS = _WORDS["openings"], _WORDS["closings"]
_MONTHS = month_name[1:]
_SYLLABLES = tuple(a + b for a, b in product("bdfgklmnprtvz", "aeiou"))


@cache
def names() -> tuple[str, ...]:
    """Return every name that the syllables make."""
    parts = product(_SYLLABLES, _SYLLABLES, ("dine", "mab", "tol", "rax", "lium", "pril"))
    return tuple("".join(name).capitalize() for name in parts)


def facts(drugs: Sequence[str], rng: random.Random) -> list[Fact]:
    """Return a fact for each drug and attribute; a code has one drug."""
    found, number = [], len(drugs)
    for attribute, (_, values, _) in SCHEMA.items():
        enough = len(values) >= number
        drawn = rng.sample(values, number) if enough else rng.choices(values, k=number)
        found += [Fact(drug, attribute, v) for drug, v in zip(drugs, drawn, strict=True)]
    return found


def write_notes(facts: Iterable[Fact], number: int, rng: random.Random) -> list[dict[str, str]]:
    """Return `number` different notes of every fact, shuffled. The label is the attribute."""
    notes = []
    for fact in facts:
        forms = list(product(_OPENINGS, SCHEMA[fact.attribute].sentences, _CLOSINGS, _MONTHS))
        for opening, sentence, closing, month in rng.sample(forms, number):
            text = f"{opening} {sentence} {closing}".format(month=month, **fact._asdict())
            notes.append({"text": text, "label": fact.attribute})
    rng.shuffle(notes)
    return notes


class World(NamedTuple):
    """The facts of the private drugs, and those of the public ones."""

    private: list[Fact]
    public: list[Fact]

    @property
    def drugs(self) -> list[str]:
        return sorted({fact.drug for fact in self.private})


def world(drugs: int) -> World:
    """Return the facts about so many private drugs."""
    rng = random.Random(_SEED)
    drawn = rng.sample(names(), drugs + PUBLIC_DRUGS)
    return World(facts(drawn[:drugs], rng), facts(drawn[drugs:], rng))


def make_data(out: Path, drugs: int, notes_of_a_fact: int) -> World:
    """Write private.jsonl, public.jsonl and vocabulary.txt, all names and values, to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    made = world(drugs)
    rng = random.Random(_SEED + 1)
    write(out / "private.jsonl", write_notes(made.private, notes_of_a_fact, rng))
    write(out / "public.jsonl", write_notes(made.public, PUBLIC_OF_A_FACT, rng))
    (out / "values.txt").write_text("\n".join(values()))
    (out / "vocabulary.txt").write_text("\n".join([*values(), *names()]))
    return made


@cache
def values() -> tuple[str, ...]:
    return tuple(value for about in SCHEMA.values() for value in about.values)


def sentences(drugs: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return every sentence that the public forms make of these drugs and these values."""
    return [
        sentence.format(drug=drug, value=value)
        for about in SCHEMA.values()
        for value in sorted(set(known) & set(about.values))
        for drug, sentence in product(drugs, about.sentences)
    ]


def write(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


WORD = re.compile(r"\w+")
_SENTENCE = re.compile(r"[^.!?\n]+[.!?]?")


def found_names(texts: Iterable[str], number: int) -> list[str]:
    """Return the `number` possible names that most texts hold, the most common first."""
    possible = {name.casefold(): name for name in names()}
    counts = Counter(w for text in texts for w in {*WORD.findall(text.casefold())} & {*possible})
    return [possible[word] for word, _ in sorted(counts.items(), key=lambda c: (-c[1], c[0]))][
        :number
    ]


def by_fact(notes: Iterable[Mapping[str, str]], drugs: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield the notes that name one of `drugs`, which are public, labelled by attribute and name;
    none names two. One note becomes one or none, by a rule that looks at no other note: what is
    private for the result is as private for the notes."""
    known = {drug.casefold(): drug for drug in drugs}
    for note in notes:
        named = [word for word in WORD.findall(note["text"].casefold()) if word in known]
        if named:
            yield {"text": note["text"], "label": fact_label(known[named[0]], note["label"])}


def fact_label(drug: str, attribute: str) -> str:
    return f"{attribute} of {drug}"


def statements(text: str) -> Iterator[tuple[str, Fact]]:
    """Yield the sentences that name one drug and one value of an attribute, and what they state."""
    drugs = _possible_drugs()
    for sentence in _SENTENCE.findall(text):
        words = WORD.findall(sentence.casefold())
        named = {drugs[word] for word in words if word in drugs}
        held = {_meant()[word] for word in words if word in _meant()}
        if len(named) == 1 and len(held) == 1:
            [drug], [(attribute, value)] = named, held
            yield sentence.strip(), Fact(drug, attribute, value)


@cache
def _possible_drugs() -> dict[str, str]:
    return {name.casefold(): name for name in names()}


@cache
def _meant() -> dict[str, tuple[str, str]]:
    return {
        value.casefold(): (attribute, value)
        for attribute, about in SCHEMA.items()
        for value in about.values
    }


class Question(NamedTuple):
    """`choices` are the answer and some values of other drugs."""

    drug: str
    attribute: str
    question: str
    answer: str
    choices: list[str]


def questions(facts: Sequence[Fact]) -> list[Question]:
    """Return the question of every fact."""
    rng, found = random.Random(_SEED + 2), []
    held = {name: {f.value for f in facts if f.attribute == name} for name in SCHEMA}
    for drug, attribute, value in facts:
        others = rng.sample(sorted(held[attribute] - {value}), WRONG_ANSWERS)
        question = SCHEMA[attribute].question.format(drug=drug)
        found.append(Question(drug, attribute, question, value, sorted([value, *others])))
    return found
