"""A label is a text, a number, true or false, and keeps its type from a row to the release.

Inside, a label goes by its name: the text itself, or how JSON writes the value. Different labels
have different names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dpray.io.formats import Where
from dpray.types import InputError, valid_unicode

Label = bool | int | float | str


def label_name(value: Any) -> str:
    """Return a label's name. That of a name is the name itself; a value that JSON does not have,
    as a date, goes by its text."""
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return valid_unicode(str(value))


def check_labels(labels: Sequence[Any]) -> None:
    """Raise ValueError for labels that the release could not keep or tell apart."""
    for label in labels:
        if not isinstance(label, bool | int | float | str):
            raise ValueError("a label is a text, a number, true or false")
        if isinstance(label, float) and not math.isfinite(label):
            raise ValueError("a label is no infinity and not .nan")
    names = [label_name(label) for label in labels]
    for number, name in enumerate(names):
        if name in names[:number]:
            same = labels[names.index(name)] == labels[number]
            raise ValueError(
                f"a label is given twice, {name!r}"
                if same
                else f"{name!r} is given as a text and as a value, which CSV does not tell apart"
            )
    numbers = [label for label in labels if type(label) in (int, float)]
    if len(set(numbers)) < len(numbers):
        raise ValueError("two are the same number, as 1 and 1.0 are")


def match_label(value: Any, by_name: Mapping[str, Label], column: str, where: Where) -> str:
    """Return the name of a row's label. It is one of `by_name`, of the same type, but that the
    cells of CSV, which are all texts, match by name. Raises InputError."""
    if value is None:
        raise InputError(f"{where}: column '{column}' is null; a label is needed")
    if isinstance(value, Mapping | list | tuple) or value != value:
        raise InputError(f"{where}: column '{column}' holds no text and no number")
    name = label_name(value)
    if name not in by_name:
        raise InputError(f"{where}: the label is not one of data.labels")
    label = by_name[name]
    if type(value) is not type(label) and isinstance(value, Label) and where.typed:
        raise InputError(f"{where}: the label is {_kind(value)}, and in data.labels {_kind(label)}")
    return name


def _kind(label: Label) -> str:
    if isinstance(label, bool):
        return "true or false"
    return "a text" if isinstance(label, str) else "a number"
