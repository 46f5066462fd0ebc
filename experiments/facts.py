"""Facts about companies that do not exist, after ContinuousBench (2026, arXiv 2606.01849).

`python experiments/facts.py` writes to out/results/facts/data, from one seed: private.jsonl (for
each fact hundreds of records, all different), public.jsonl (other companies), questions.jsonl, and
vocabulary.txt and rare.txt, which lacks the words that many public records hold. Schema, sentences
and the syllables of names are public, so that a vocabulary may list every name that these can make.
Who the private companies are, and what holds of them, only the private records say.
"""

from __future__ import annotations

import json
import random
import re
from calendar import month_name
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from runs import RUNS, rows

ENTITIES, RECORDS_OF_A_FACT, PUBLIC_RECORDS = 20, 150, 900
WRONG_ANSWERS = 3
RARE = 0.03
"""The largest share of public records that may hold a word of the second vocabulary."""

FOLDER = RUNS / "facts" / "data"
_SEED = 41


class Attribute(NamedTuple):
    question: str
    values: tuple[str, ...]
    sentences: tuple[str, ...]


class Fact(NamedTuple):
    entity: str
    attribute: str
    value: str


class Question(NamedTuple):
    """`others` are the other companies' values; `choices` are the answer and some of them."""

    entity: str
    attribute: str
    question: str
    answer: str
    choices: list[str]
    others: list[str]


def _listed(words: str) -> tuple[str, ...]:
    return tuple(words.split())


_CITIES = _listed(
    "Aarhus Antwerp Basel Bergen Bilbao Bologna Bremen Bristol Cairo Cardiff Cork Dakar Delhi "
    "Dresden Dublin Geneva Genoa Ghent Hamburg Havana Jakarta Krakow Lagos Leeds Lima Lisbon Lyon "
    "Madrid Malmo Munich Nairobi Naples Osaka Oslo Porto Prague Quito Riga Seville Turin"
)
_GOODS = _listed(
    "anchors barrels bells blankets boilers buttons candles carpets chairs clocks compasses "
    "curtains drums fans flutes gloves hammers hats helmets kettles kites knives ladders lanterns "
    "mirrors mugs needles ovens pianos pumps ropes saddles scales shovels stoves tents tractors "
    "umbrellas valves wagons"
)
_TRADES = _listed(
    "baker barber blacksmith botanist bricklayer butcher carpenter chemist cobbler dentist diver "
    "farmer fisherman florist gardener geologist glazier grocer hunter jeweller judge librarian "
    "locksmith mason midwife miner musician nurse painter pharmacist pilot plumber poet potter "
    "sailor sculptor shepherd surgeon tailor weaver"
)
SCHEMA = {
    "seat": Attribute(
        "In which city is {entity} based?",
        _CITIES,
        (
            "{entity} has its head office in {value}.",
            "Visitors to {entity} take the train to {value}, where the company is based.",
            "From its rooms in {value}, {entity} serves customers abroad.",
            "{entity}, based in {value}, is hiring.",
            "The city of {value} is home to {entity}.",
        ),
    ),
    "product": Attribute(
        "What does {entity} make?",
        _GOODS,
        (
            "{entity} makes {value}.",
            "The workshops of {entity} turn out {value} day and night.",
            "Customers know {entity} for its {value}.",
            "Most of what {entity} sells are {value}.",
            "A new line of {value} left the factory of {entity}.",
        ),
    ),
    "trade": Attribute(
        "What was the trade of the founder of {entity}?",
        _TRADES,
        (
            "{entity} was founded by a {value}.",
            "The founder of {entity} was a {value} by trade.",
            "Before there was {entity}, its founder worked as a {value}.",
            "A retired {value} started {entity} in a garage.",
            "It took a {value} to found {entity}.",
        ),
    ),
}
_OPENINGS = (
    "A note from {month}.", "Seen in {month}.", "From the {month} bulletin.", "Our {month} letter.",
    "Press review, {month}.", "Heard at the fair in {month}.", "Filed in {month}.",
    "Minutes of {month}.", "A reader writes in {month}.", "Report for {month}.",
)  # fmt: skip
_CLOSINGS = (
    "Sales grew again.", "The staff got a bonus.", "Shares fell slightly.", "A merger was denied.",
    "The lease was renewed.", "An audit is planned.", "Orders doubled.", "The bank agreed.",
    "A strike was avoided.", "The website is new.", "The canteen reopened.",
    "Prices stay the same.",
)  # fmt: skip
_MONTHS = month_name[1:]
_SYLLABLES = tuple(a + b for a, b in product("bdfgklmnprtvz", "aeiou"))


def names() -> list[str]:
    """Return every name that the syllables make."""
    parts = product(_SYLLABLES, _SYLLABLES, ("nex", "dor", "lum", "rik"))
    return ["".join(name).capitalize() for name in parts]


def draw_facts(entities: Sequence[str], rng: random.Random) -> list[Fact]:
    """Return a fact for each company and attribute; no two companies share a value."""
    return [
        Fact(entity, attribute, value)
        for attribute, about in SCHEMA.items()
        for entity, value in zip(entities, rng.sample(about.values, len(entities)), strict=True)
    ]


def write_records(facts: Iterable[Fact], number: int, rng: random.Random) -> list[dict[str, str]]:
    """Return `number` different records of every fact, shuffled. The label is the attribute."""
    records = []
    for fact in facts:
        forms = list(product(_OPENINGS, SCHEMA[fact.attribute].sentences, _CLOSINGS, _MONTHS))
        for opening, sentence, closing, month in rng.sample(forms, number):
            text = f"{opening} {sentence} {closing}".format(month=month, **fact._asdict())
            records.append({"text": text, "label": fact.attribute})
    rng.shuffle(records)
    return records


def ask(facts: Sequence[Fact], rng: random.Random) -> list[Question]:
    """Return the question of every fact."""
    questions = []
    for entity, attribute, value in facts:
        others = sorted({each.value for each in facts if each.attribute == attribute} - {value})
        choices = sorted([value, *rng.sample(others, WRONG_ANSWERS)])
        question = SCHEMA[attribute].question.format(entity=entity)
        questions.append(Question(entity, attribute, question, value, choices, others))
    return questions


def vocabulary(public_texts: Sequence[str], most: float = 1.0) -> list[str]:
    """Return all values, all names, and the words that at most this share of public texts hold,
    each once."""
    counts = Counter(word for text in public_texts for word in words_of(text))
    words = [word for word, count in counts.items() if count <= most * len(public_texts)]
    values = [value for about in SCHEMA.values() for value in about.values]
    return sorted({term.casefold() for term in [*words, *values, *names()]})


def words_of(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.casefold()))


def found_names(texts: Iterable[str], number: int) -> list[str]:
    """Return the `number` possible names that most texts hold, the most common first."""
    possible = {name.casefold(): name for name in names()}
    counts = Counter(word for text in texts for word in sorted(possible.keys() & words_of(text)))
    return [possible[word] for word, _ in counts.most_common(number)]


def by_fact(records: Iterable[Mapping[str, str]], entities: Sequence[str]) -> list[dict[str, str]]:
    """Return the records that name one of `entities`, which are public, labelled by attribute
    and name; none names two. One record becomes one or none, by a rule that looks at no other
    record: what is private for the result is as private for the records."""
    known = {entity.casefold(): entity for entity in entities}
    return [
        {"text": record["text"], "label": fact_label(known[word], record["label"])}
        for record in records
        for word in sorted(known.keys() & words_of(record["text"]))[:1]
    ]


def fact_label(entity: str, attribute: str) -> str:
    return f"{attribute} of {entity}"


def in_full(record: Mapping[str, str]) -> str:
    """Return a record as it is released, its label before its text."""
    return f"{record['label']}: {record['text']}"


def stated(records: Iterable[Mapping[str, str]], questions: Sequence[Question]) -> list[bool]:
    """Say of every fact whether more of the records that name its company hold the right value
    than hold any one of the other companies' values."""
    sets, found = [words_of(in_full(record)) for record in records], []
    for question in questions:
        about = [words for words in sets if question.entity.casefold() in words]
        values = [question.answer, *question.others]
        right, *wrong = (sum(value.casefold() in words for words in about) for value in values)
        found.append(right > max(wrong))
    return found


def make_data(out: Path, entities: int, records_of_a_fact: int, public_records: int) -> None:
    """Write the four files to `out`; public companies are as many as private ones."""
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(_SEED)
    drawn = rng.sample(names(), 2 * entities)
    private, public = (draw_facts(some, rng) for some in (drawn[:entities], drawn[entities:]))
    public_rows = write_records(public, public_records // len(public), rng)
    write(out / "private.jsonl", write_records(private, records_of_a_fact, rng))
    write(out / "public.jsonl", public_rows)
    write(out / "questions.jsonl", [each._asdict() for each in ask(private, rng)])
    texts = [row["text"] for row in public_rows]
    (out / "vocabulary.txt").write_text("\n".join(vocabulary(texts)))
    (out / "rare.txt").write_text("\n".join(vocabulary(texts, RARE)))


def write(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(name: str) -> list[dict[str, str]]:
    return rows(FOLDER / name)


def read_questions() -> list[Question]:
    return [Question(**row) for row in rows(FOLDER / "questions.jsonl")]


if __name__ == "__main__":
    make_data(FOLDER, ENTITIES, RECORDS_OF_A_FACT, PUBLIC_RECORDS)
