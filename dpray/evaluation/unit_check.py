"""The owner's counts of people: equal texts, the units of `data.unit`, and columns that look like a
person. Eight bytes are kept of each value, and no value is kept or shown."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from dpray.config.data import DataConfig
from dpray.io.columns import dotted_names
from dpray.io.formats import Where
from dpray.io.units import alike, unit_of
from dpray.types import InputError, Json
from dpray.workers.rows import Row

MOST_COLUMNS = 8
"""At most so many columns that look like a person are counted."""

PERSON = re.compile(
    r"user|usr|patient|client|customer|person|author|e?mail|member|employee|student|participant|"
    r"respondent|sender|reviewer|caller|speaker|owner|account|mrn|ssn|phone|mobile|contact|"
    r"applicant|citizen|resident|tenant|writer|visitor|guest|buyer|subscriber|donor|requester|"
    r"reporter|assignee|creator|poster|insured|household|family|firstname|lastname|fullname|"
    r"surname|nickname|handle|beneficiary|borrower|holder|benutzer|nutzer|kunde|mitarbeiter|"
    r"versicherte|utilisateur|cliente|usuario|paciente"
)
"""Matches the beginning of a word that means a person."""

NO_PERSON = re.compile(
    r"type|status|kind|class|category|segment|group|tier|level|age|gender|sex|race|country|"
    r"region|city|state|zip|timezone|zone|location|language|lang|locale|count|total|followers|"
    r"rating|score|satisfaction|"
    r"sentiment|since|date|time|created|updated|feedback|comment|comments|message|text|note|"
    r"notes|review|story|question|answer|query|request|input|prompt|content|body|title|"
    r"history|summary|report|complaint|url|link|image|photo|verified|active|premium|agent|"
    r"system"
)
"""A column with one of these words in its name says something about a person, or is a text."""


def looks_like_person(column: str) -> bool:
    """Return whether a column's name is one of a person: `user_id`, `PatientNo`, `from.email`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", column)
    parts = [part.casefold() for part in re.split(r"[\W_]+", words) if part]
    about = [part for part in parts if PERSON.match(part) or part == "subject"]
    if about == ["subject"] and "id" not in parts:  # of a mail
        return False
    if parts == ["name"]:  # of a thing, perhaps; who looks at the rows decides
        return True
    return bool(about) and not any(map(NO_PERSON.fullmatch, parts))


class People:
    """Counts the valid records of all files."""

    def __init__(self, data: DataConfig) -> None:
        self.data = data
        self._texts, self._units, self._forms = array("Q"), array("Q"), array("Q")
        self._columns: defaultdict[str, array[int]] = defaultdict(lambda: array("Q"))
        self._likely: list[str] | None = None

    def add(self, where: Where, row: Mapping[str, object], record: Row) -> None:
        self._texts.append(_short_digest(record["text"]))
        if self.data.unit is not None:
            self._units.append(_short_digest(record["unit"]))
            self._forms.append(_short_digest(alike(record["unit"])))
            return
        if self._likely is None:
            others = {*self.data.text_columns, self.data.label}
            names = [n for n in dotted_names(row, varied=where.varied) if n not in others]
            self._likely = [name for name in names if looks_like_person(name)][:MOST_COLUMNS]
        for name in self._likely:
            try:
                self._columns[name].append(_short_digest(unit_of(row, name, where)))
            except InputError:
                continue  # it names nobody

    def summary(self) -> Json:
        """Return `equal_texts`, the number of records that share their text with another; `units`,
        None without `data.unit`; and `persons`, columns with repeated values."""
        times = _times(self._texts)
        return {
            "equal_texts": int(times[times > 1].sum()),
            "units": None if self.data.unit is None else self._counted_units(),
            "persons": [
                {
                    "column": name,
                    "values": len(times),
                    "records": int(times.sum()),
                    "most": int(times.max()),
                }
                for name, values in self._columns.items()
                if len(times := _times(values)) > 1 and times.max() > 1
            ],
        }

    def _counted_units(self) -> dict[str, int]:
        times, most = _times(self._units), self.data.max_records_per_unit
        pairs = np.unique(np.stack([_numbers(self._units), _numbers(self._forms)]), axis=1)
        _, alike = np.unique(pairs[1], return_counts=True)
        return {
            "units": len(times),
            "most_records": int(times.max(initial=0)),
            "left_out": int(np.maximum(times - most, 0).sum()),
            "alike": int(alike[alike > 1].sum()),
        }


def _short_digest(text: str) -> int:
    encoded = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "big")


def _numbers(values: array[int]) -> npt.NDArray[np.uint64]:
    return np.frombuffer(values, dtype=np.uint64)


def _times(values: array[int]) -> npt.NDArray[np.int64]:
    """Return how often each value occurs."""
    counts: npt.NDArray[np.int64] = np.unique(_numbers(values), return_counts=True)[1]
    return counts
