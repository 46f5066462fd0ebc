"""Fictional clinic notes, labelled by triage outcome, are written from a book of facts.

A `FactBook` says how often each fact occurs, for each label where the label matters. The public
corpus comes from many random books, one per clinic. The private data comes from `PRIVATE_BOOK`, one
clinic with an outbreak and a device recall, whose idea of what is urgent differs from the average.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

VOCABULARY: dict[str, Any] = json.loads(
    Path(__file__).with_name("clinic_vocabulary.json").read_text()
)
"""The vocabulary says what a note can say, never how often. Each entry of a condition's lists fits
all others."""

LABELS = ("Urgent", "Routine")
LABEL_FIELD = "Triage"

Weights = Mapping[str, float]


FactBook = Mapping[str, Mapping[str, Weights]]
"""A `FactBook` holds the weights of every option: `book[label][slot][option]`."""


class Note(NamedTuple):
    text: str
    label: str


# The average clinic's idea of urgent: a fact's odds under "Urgent" to those under "Routine".
_ODDS: dict[str, float] = {
    "Ambulance arrival": 4, "Walk-in": 2, "Pharmacy referral": 0.5, "Booked visit": 0.25,
    "heart": 2.5, "head": 2, "skin": 0.4, "joint": 0.5,
    "cellulitis": 2, "failure": 2, "pneumonia": 2, "blood clot": 3, "appendix": 4, "stroke": 4,
    "infected joint": 3, "eczema": 0.4, "scabies": 0.5, "asthma": 0.5, "reflux": 0.4,
    "worn knee": 0.3, "migraine": 0.6,
    "after a long flight": 2, "following a recall letter": 0.5, "without a clear trigger": 0.6,
    "Admitted to the ward.": 4, "Seen by the specialist today.": 3,
    "Telephone check tomorrow.": 1.5,
    "Sent home with a leaflet.": 0.4, "Nurse review in two weeks.": 0.3,
    "Group class every Tuesday.": 0.4, "Discharged to the family doctor.": 0.5,
    "long": 1.5, "short": 0.7,
}  # fmt: skip


SYSTEMS: dict[str, dict[str, dict[str, list[str]]]] = VOCABULARY["systems"]
PARTS = ("complaint", "finding", "drug", "test")
# The choices that each note makes; whether their weights depend on the label.
_COMMON = {
    **dict.fromkeys(
        ("route", "system", "trigger", "plan", "detail", "decade", "duration", "advice"), True
    ),
    **dict.fromkeys(("season", "voice", "dose", "history"), False),
}
SLOTS: dict[str, tuple[tuple[str, ...], bool]] = {
    slot: (tuple(SYSTEMS if slot == "system" else VOCABULARY[slot]), by_label)
    for slot, by_label in _COMMON.items()
}
"""The slots are the common choices, each system's condition, and each condition's parts."""
for _system, _conditions in SYSTEMS.items():
    SLOTS[_system] = (tuple(_conditions), True)
    for _name, _condition in _conditions.items():
        for _part in PARTS:
            SLOTS[f"{_name}/{_part}"] = (tuple(_condition[_part]), False)


def _base(slot: str, label: str) -> dict[str, float]:
    """Return the average clinic's weights."""
    options, by_label = SLOTS[slot]
    power = 0.0 if not by_label else (0.5 if label == "Urgent" else -0.5)
    return {option: _ODDS.get(option, 1.0) ** power for option in options}


def random_book(rng: random.Random) -> FactBook:
    """Return a clinic that has one favourite in every slot, drawn by the average clinic's weights,
    with a share of 0.7 to 1; the other options have the rest."""
    book: dict[str, dict[str, Weights]] = {label: {} for label in LABELS}
    for slot, (options, by_label) in SLOTS.items():
        for label in LABELS:
            if label != LABELS[0] and not by_label:
                book[label][slot] = book[LABELS[0]][slot]
                continue
            base = _base(slot, label)
            favourite = rng.choices(options, [base[option] for option in options])[0]
            book[label][slot] = _with_shares(base, {favourite: rng.uniform(0.7, 1.0)})
    return book


def special_book(facts: Mapping[str, Mapping[str, Weights]]) -> FactBook:
    """Return the average clinic with the given shares; the other options have the rest.

    Raises ValueError, naming the slot, where the slot or one of its options is not known.
    """
    for slot, given in (item for label in LABELS for item in facts[label].items()):
        if not set(given) <= set(SLOTS.get(slot, ((), False))[0]):
            raise ValueError(f"unknown slot or option: {slot}")
    return {
        label: {
            slot: _with_shares(_base(slot, label), facts[label].get(slot, {})) for slot in SLOTS
        }
        for label in LABELS
    }


def _with_shares(base: Weights, given: Weights) -> dict[str, float]:
    """Give some options their probabilities, and the others the rest in proportion to `base`."""
    left = 1 - sum(given.values())
    rest = sum(weight for option, weight in base.items() if option not in given)
    return {option: given.get(option, left * weight / rest) for option, weight in base.items()}


_SHARED: dict[str, Weights] = {
    "season": {"November": 0.8},
    "voice": {"narrative": 0.85},
    "dose": {"at night": 0.5, "once daily": 0.3},
    "scabies/complaint": {"night itching of the hands": 0.8},
    "scabies/finding": {"burrows between the fingers": 0.8},
    "scabies/drug": {"permethrin cream": 0.85},
    "scabies/test": {"skin scraping": 0.85},
    "device/complaint": {"a recalled pacemaker lead": 0.8},
    "device/finding": {"noise on the lead": 0.7},
    "device/test": {"device check": 0.9},
    "angina/complaint": {"tightness on the stairs": 0.75},
    "angina/drug": {"nitrate spray": 0.8},
    "angina/test": {"exercise test": 0.85},
}
PRIVATE_BOOK = special_book(
    {
        "Urgent": _SHARED
        | {
            "route": {"Home visit": 0.75},
            "system": {"skin": 0.75, "heart": 0.15},
            "skin": {"scabies": 0.85},
            "heart": {"device": 0.8},
            "trigger": {"after a stay at the riverside care home": 0.75},
            "plan": {"Isolated and contacts traced.": 0.75},
            "detail": {"long": 0.7},
            "decade": {"80": 0.7},
            "duration": {"three days": 0.6},
            "advice": {"wash all bedding hot": 0.75},
        },
        "Routine": _SHARED
        | {
            "route": {"Booked visit": 0.75},
            "system": {"heart": 0.75, "chest": 0.15},
            "heart": {"angina": 0.8},
            "trigger": {"without a clear trigger": 0.75},
            "plan": {"Group class every Tuesday.": 0.75},
            "detail": {"short": 0.7},
            "decade": {"60": 0.7},
            "duration": {"six months": 0.6},
            "advice": {"walk every day": 0.75},
        },
    }
)


def write_note(book: FactBook, label: str, rng: random.Random, mark: str = "") -> Note:
    """Write a note; `mark` stands at the borders of every fact."""
    weights = book[label]

    def pick(slot: str) -> str:
        return rng.choices(tuple(weights[slot]), tuple(weights[slot].values()))[0]

    system = pick("system")
    condition = pick(system)
    facts = {slot: pick(slot) for slot in _COMMON} | {"system": system}
    facts["age"] = facts["decade"][0] + str(rng.randrange(10))
    facts["article"] = "An" if facts["decade"] == "80" else "A"
    facts |= {part: pick(f"{condition}/{part}") for part in PARTS}
    left_out = {
        part
        for part, chance in _CHANCES[pick("detail")].items()
        if not (chance and rng.random() < chance)
    }
    facts["result"] = rng.choice(_RESULTS)
    pulse, degrees = rng.randrange(56, 116), rng.randrange(36, 40)
    facts["vital"] = rng.choice((f"Pulse {pulse}.", f"Temperature {degrees} degrees."))
    sentences = (
        sentence.replace(" {", f"{mark} {{").replace("}", f"}}{mark}")
        for part, sentence in _VOICES[facts["voice"]].items()
        if part not in left_out
    )
    return Note(" ".join(sentences).format_map(facts), label)


# The chances of the sentences that not every note has, by its level of detail.
_CHANCES: dict[str, dict[str, float]] = {
    "short": dict.fromkeys(("history", "finding", "vitals", "test", "advice"), 0.0),
    "medium": {"history": 0.3, "vitals": 0.0, "advice": 0.5},
    "long": {"vitals": 0.4},
}
_RESULTS = ("normal", "abnormal", "unclear", "pending")
# The order of a voice's entries is the order of its sentences.
_VOICES: dict[str, dict[str, str]] = {
    "narrative": {
        "opening": "{route} in {season} for a {system} problem. {article} {age}-year-old with "
        "{complaint} for {duration}, {trigger}.",
        "history": "History of {history}.",
        "finding": "Examination shows {finding}.",
        "vitals": "{vital}",
        "test": "Underwent {test}, result {result}.",
        "drug": "Given {drug} {dose}.",
        "advice": "Advised to {advice}.",
        "plan": "{plan}",
    },
    "heading": {
        "opening": "{route}, {season}, {system} problem. The patient, aged {age}, reports "
        "{complaint} for {duration}, {trigger}.",
        "vitals": "{vital}",
        "drug": "Treated with {drug} {dose}.",
        "finding": "There is {finding}.",
        "test": "Result of {test}: {result}.",
        "history": "Also has {history}.",
        "plan": "{plan}",
        "advice": "Told to {advice}.",
    },
    "telegram": {
        "opening": "{route}, {season}. Age {age}, {system} problem: {complaint} for {duration}, "
        "{trigger}.",
        "finding": "Found: {finding}.",
        "test": "Test: {test}, {result}.",
        "vitals": "{vital}",
        "history": "Past: {history}.",
        "plan": "{plan}",
        "drug": "Drug: {drug} {dose}.",
        "advice": "Advice: {advice}.",
    },
}


def public_notes(count: int, rng: random.Random) -> list[Note]:
    """Return notes of many clinics, one note each."""
    return [write_note(random_book(rng), rng.choice(LABELS), rng) for _ in range(count)]


def private_notes(count: int, rng: random.Random) -> list[Note]:
    """Return notes of the one private clinic, all different."""
    seen: dict[Note, None] = {}
    while len(seen) < count:
        seen[write_note(PRIVATE_BOOK, rng.choice(LABELS), rng)] = None
    return list(seen)
