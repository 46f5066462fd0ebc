"""Fictional clinic notes, labelled by triage outcome, are written from a book of facts.

A `FactBook` says how often each fact occurs, for each label where the label matters. The public
corpus comes from many random books, one per clinic. The private data comes from `PRIVATE_BOOK`, one
clinic with an outbreak and a device recall, whose idea of what is urgent differs from the average.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from dpray.demo.vocabulary import (
    ADVICE,
    DECADES,
    DETAILS,
    DOSES,
    DURATIONS,
    HISTORIES,
    PLANS,
    ROUTES,
    SEASONS,
    SYSTEMS,
    TRIGGERS,
    VOICES,
)

LABELS = ("Urgent", "Routine")
LABEL_FIELD = "Triage"

Weights = Mapping[str, float]


@dataclass(frozen=True)
class Note:
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


def _slots() -> dict[str, tuple[tuple[str, ...], bool]]:
    """Return every choice that a note makes: its options, and whether they depend on the label."""
    slots: dict[str, tuple[tuple[str, ...], bool]] = {
        "route": (ROUTES, True),
        "system": (tuple(SYSTEMS), True),
        "trigger": (TRIGGERS, True),
        "plan": (PLANS, True),
        "detail": (DETAILS, True),
        "decade": (DECADES, True),
        "duration": (DURATIONS, True),
        "advice": (ADVICE, True),
        "season": (SEASONS, False),
        "voice": (VOICES, False),
        "dose": (DOSES, False),
        "history": (HISTORIES, False),
    }
    for system, conditions in SYSTEMS.items():
        slots[system] = (tuple(conditions), True)
        for name, condition in conditions.items():
            slots[f"{name}/complaint"] = (condition.complaints, False)
            slots[f"{name}/finding"] = (condition.findings, False)
            slots[f"{name}/drug"] = (condition.drugs, False)
            slots[f"{name}/test"] = (condition.tests, False)
    return slots


SLOTS = _slots()


def _base(slot: str, label: str) -> dict[str, float]:
    """Return the average clinic's weights."""
    options, by_label = SLOTS[slot]
    power = 0.0 if not by_label else (0.5 if label == "Urgent" else -0.5)
    return {option: _ODDS.get(option, 1.0) ** power for option in options}


def _peaked(base: Weights, option: str, share: float) -> dict[str, float]:
    """Give `option` the probability `share`, and the others the rest in proportion to `base`."""
    rest = sum(weight for other, weight in base.items() if other != option)
    return {
        other: share if other == option else (1 - share) * weight / rest
        for other, weight in base.items()
    }


@dataclass(frozen=True)
class FactBook:
    """A `FactBook` holds the weights of every option of every slot, for each label:
    `weights[label][slot][option]`."""

    weights: Mapping[str, Mapping[str, Weights]]

    @classmethod
    def random(cls, rng: random.Random) -> FactBook:
        """Return a clinic that has one favourite in every slot, drawn by the average clinic's
        weights."""
        weights: dict[str, dict[str, Weights]] = {label: {} for label in LABELS}
        for slot, (options, by_label) in SLOTS.items():
            for label in LABELS:
                if label != LABELS[0] and not by_label:
                    weights[label][slot] = weights[LABELS[0]][slot]
                    continue
                base = _base(slot, label)
                favourite = rng.choices(options, [base[option] for option in options])[0]
                weights[label][slot] = _peaked(base, favourite, rng.uniform(0.7, 1.0))
        return cls(weights)

    @classmethod
    def special(cls, facts: Mapping[str, Mapping[str, Weights]]) -> FactBook:
        """Return the average clinic with the given shares; what is left of 1 goes to the other
        options.

        Raises ValueError, naming the slot, where the slot or one of its options is not known.
        """
        for slot, given in (item for label in LABELS for item in facts[label].items()):
            if not set(given) <= set(SLOTS.get(slot, ((), False))[0]):
                raise ValueError(f"unknown slot or option: {slot}")
        weights: dict[str, dict[str, Weights]] = {}
        for label in LABELS:
            weights[label] = {}
            for slot in SLOTS:
                base = _base(slot, label)
                given = facts[label].get(slot, {})
                left = (1 - sum(given.values())) / sum(
                    weight for option, weight in base.items() if option not in given
                )
                weights[label][slot] = {
                    option: given.get(option, left * weight) for option, weight in base.items()
                }
        return cls(weights)


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
PRIVATE_BOOK = FactBook.special(
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


class NoteWriter:
    """A `NoteWriter` writes notes from a book. All randomness comes from `rng`."""

    def __init__(self, book: FactBook, rng: random.Random) -> None:
        self._book, self._rng = book, rng

    def write(self, label: str, mark: str = "") -> Note:
        """Write a note; `mark` stands at the borders of every fact."""
        weights, rng = self._book.weights[label], self._rng

        def pick(slot: str) -> str:
            return rng.choices(tuple(weights[slot]), tuple(weights[slot].values()))[0]

        system = pick("system")
        condition = pick(system)
        facts = {slot: pick(slot) for slot in SLOTS if "/" not in slot and slot not in SYSTEMS}
        facts |= {
            "system": system,
            "age": facts["decade"][0] + str(rng.randrange(10)),
            "article": "An" if facts["decade"] == "80" else "A",
            **{
                part: pick(f"{condition}/{part}")
                for part in ("complaint", "finding", "drug", "test")
            },
        }
        voice = {
            part: sentence.replace(" {", f"{mark} {{").replace("}", f"}}{mark}")
            for part, sentence in _VOICES[facts["voice"]].items()
        }
        history, finding, vitals, result, advice = self._details(DETAILS.index(pick("detail")))
        parts = {
            "opening": True,
            "history": history,
            "finding": finding,
            "vitals": vitals,
            "test": result,
            "drug": True,
            "advice": advice,
            "plan": True,
        }
        facts |= {"result": rng.choice(_RESULTS), "vital": self._vital()}
        return Note(" ".join(voice[part].format_map(facts) for part in voice if parts[part]), label)

    def _details(self, level: int) -> tuple[bool, bool, bool, bool, bool]:
        """Return whether history, finding, vitals, test and advice appear, at a level of detail."""
        chance = self._rng.random
        if level == 0:
            return False, False, False, False, False
        if level == 1:
            return chance() < 0.3, True, False, True, chance() < 0.5
        return True, True, chance() < 0.4, True, True

    def _vital(self) -> str:
        rng = self._rng
        pulse, degrees = rng.randrange(56, 116), rng.randrange(36, 40)
        return rng.choice((f"Pulse {pulse}.", f"Temperature {degrees} degrees."))


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
    return [NoteWriter(FactBook.random(rng), rng).write(rng.choice(LABELS)) for _ in range(count)]


def private_notes(count: int, rng: random.Random) -> list[Note]:
    """Return notes of the one private clinic, all different."""
    writer = NoteWriter(PRIVATE_BOOK, rng)
    seen: dict[str, Note] = {}
    while len(seen) < count:
        note = writer.write(rng.choice(LABELS))
        seen.setdefault(note.text, note)
    return list(seen.values())
