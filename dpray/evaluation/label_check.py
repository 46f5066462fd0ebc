"""The owner's check of columns that have a public set of values: labels, and roles of messages.

Values outside the set are shown, unless they may be texts of records.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import TypedDict

from dpray.config.data import DataConfig
from dpray.io.columns import Label, column_of, is_code, is_of_other_type, label_name, plain_value
from dpray.io.formats import Where
from dpray.io.near_labels import COMMA, nearest, spelled, spelled_list
from dpray.io.table import messages_of, role_of
from dpray.types import InputError

FEW_VALUES = 50
"""So many values are not suspected to be texts."""

SHORT_VALUE, LONG, OFTEN = 40, 120, 3
"""A value of at most SHORT_VALUE characters is shown. One of at most LONG is if OFTEN rows have
it."""

TYPE = "type"

MOST_VALUES = 2000
"""More values than this are texts, and are not kept."""


class NameTally:
    """Counts the names of values, and those that are not `known`."""

    def __init__(self, known: Collection[str]) -> None:
        self.known, self.counts, self.too_many = known, Counter[str](), False

    def add(self, name: str) -> None:
        if name in self.known or name in self.counts or len(self.counts) < MOST_VALUES:
            self.counts[name] += 1
        else:
            self.too_many = True

    @property
    def others(self) -> dict[str, int] | None:
        """Return the numbers of the values that are not known, the most common first, but of those
        that may be texts. None if most of them are: half of them occur once or so."""
        found = {name: n for name, n in self.counts.most_common() if name not in self.known}
        if self.too_many or (len(found) > FEW_VALUES and sum(found.values()) < 2 * len(found)):
            return None
        return {name: n for name, n in found.items() if _may_be_shown(name, n)}

    @property
    def hidden(self) -> int:
        """Return how many other values are not shown; MOST_VALUES or more if they were too many."""
        others = {*self.counts} - {*self.known}
        return len(others) - len(self.others or ())


def _may_be_shown(name: str, count: int) -> bool:
    return len(name) <= SHORT_VALUE or (len(name) <= LONG and count >= OFTEN)


class Difference(TypedDict):
    """A label of rows that is not of data.labels."""

    label: Label
    rows: int
    near: Label | None
    difference: str


class LabelCheck:
    """Counts the labels and the roles of rows, and finds what data.labels and data.roles lack."""

    def __init__(self, data: DataConfig) -> None:
        self.data, self.known = data, data.label_names
        self.labels, self.roles = NameTally(self.known), NameTally(data.roles)
        self.of_other_type: dict[str, tuple[Label, int]] = {}
        self.values: dict[str, Label] = {}

    def add(self, row: Mapping[str, object], where: Where) -> None:
        """Count the label of a row, unless its column is one of texts, and the roles in it."""
        label, turns = self.data.label, self.data.turns
        if label is not None and label not in self.data.text_columns:
            with suppress(InputError):
                self._add_label(column_of(row, label, where), label, where)
        if turns is not None:
            with suppress(InputError):
                for message in messages_of(row, turns, where):
                    role = message["role"]
                    self.roles.add(role_of(role, self.data.roles) or role)

    def _add_label(self, value: object, column: str, where: Where) -> None:
        name = label_name(plain_value(value, column, where))
        self.labels.add(name)
        if name in self.known:
            known = self.known[name]
            if isinstance(value, Label) and is_of_other_type(value, known, column, where):
                self.of_other_type[name] = value, self.of_other_type.get(name, (value, 0))[1] + 1
        elif isinstance(value, Label) and len(self.values) < MOST_VALUES:
            self.values[name] = value

    @property
    def other_rows(self) -> int:
        """Return the rows that have a label which is not of data.labels."""
        return sum(n for name, n in self.labels.counts.items() if name not in self.known)

    @property
    def codes(self) -> list[str]:
        """Return the labels of which prompts would say a code, such as "1"."""
        return [n for n in self.known if is_code(n) and n not in self.data.label_about]

    def differences(self) -> list[Difference]:
        """Return the labels of the rows that are not of data.labels, if they are near to one or
        have a comma: the label, its rows, the near one or None, and the difference."""
        found: list[Difference] = [
            {"label": label, "rows": rows, "near": self.known[name], "difference": TYPE}
            for name, (label, rows) in self.of_other_type.items()
        ]
        for name in self.labels.others or ():
            near, difference = nearest(name, self.known) or (None, COMMA if "," in name else None)
            if difference is not None:
                value, rows = self.values.get(name, name), self.labels.counts[name]
                shown = None if near is None else self.known[near]
                found.append(
                    {"label": value, "rows": rows, "near": shown, "difference": difference}
                )
        return found

    def proposals(self) -> dict[str, tuple[str, str]]:
        """Return data.labels with the labels as the rows spell them, where no row has the near one,
        and data.roles with those that it lacks; each with the reason."""
        found = {}
        labels, spelling = dict(self.known), spelled_list(self.data.labels)
        for each in self.differences():
            if each["near"] is None or each["difference"] == COMMA:
                continue
            if not self.labels.counts[near := label_name(each["near"])]:
                labels[near] = each["label"]
        if (proposed := spelled_list(labels.values())) != spelling:
            found["data.labels"] = proposed, "as the rows spell them"
        if others := self.roles.others:
            found["data.roles"] = spelled_list([*self.data.roles, *others]), "all roles of the rows"
        return found


def difference_in_words(difference: Difference) -> str:
    """Return one of the differences as a sentence."""
    label, near, what = difference["label"], difference["near"], difference["difference"]
    shown = f"{spelled(label)} ({difference['rows']:,} rows)"
    if near is None or what == COMMA:
        why = "has a comma" if near is None else "is several labels in data.labels"
        setting = shlex.quote(f"data.labels=[{spelled(label)}, ...]")
        return f"{shown} {why}; write it in quotes: {setting}"
    return f"{shown} is {spelled(near)} in data.labels: they differ in {what}"
