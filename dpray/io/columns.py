"""A row's columns: its text, its label, and any other by its name.

A label is a text, a number, true or false, and keeps its type from a row to the release. Inside, a
label goes by its name: the text itself, or how JSON writes the value. Different labels have
different names.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from dpray.io.formats import TWICE, Where, folder_columns
from dpray.types import InputError, did_you_mean, valid_unicode

MOST_NAMES = 20
MOST_LETTERS = 40
MOST_WORDS = 4
MANY_CUT = 0.2

_DIVIDED = re.compile(r"\w+([^\w\s.,'\"\x00-\x1f\x7f-\x9f-])\w+(?:\1\w+)*")
"""Matches a name that looks like several with a delimiter between them, which a key may have: no
control character."""

MOST_KEYS = 50
"""An object within a row with more keys than this may have data for keys."""

ROLE_KEYS = ("role", "from")
"""The keys of a message's role, as OpenAI and ShareGPT name them."""

Label = bool | int | float | str

_VISIBLE = re.compile(
    r"[^\s\x00-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    r"\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3"
    r"\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""Matches what can be seen: no blank, no control character, none that Unicode says to ignore
(Default_Ignorable_Code_Point), and no empty Braille cell."""


def column_of(row: Mapping[str, object], name: str, where: Where) -> object:
    """Return the value of a column, None for null. A dotted name leads to a nested value if no
    column has this very name; a number in it counts the entries of a list from 0, and an entry
    beyond the end is null. Raises InputError; at the first row it lists the columns there are."""
    try:
        value = value_at(row, name)
    except LookupError:
        # Later rows of JSON may have names of their own, which are as private as values.
        listed = _there_are(row, name, where) if where.row == 1 else ""
        raise InputError(f"{where}: no column '{name}'{listed}") from None
    if value is TWICE:
        raise InputError(f"{where}: column '{name}' is named twice; rename one of the two")
    return value


def value_at(value: object, name: str) -> object:
    """Return what a dotted name leads to. Raises LookupError if a key is missing."""
    if isinstance(value, Mapping) and name in value:
        return value[name]
    for part in name.split("."):
        if value is None or value is TWICE:
            return value
        if isinstance(value, list | tuple) and re.fullmatch(r"\d{1,9}", part):
            value = value[int(part)] if int(part) < len(value) else None
        elif isinstance(value, Mapping) and part in value:
            value = value[part]
        else:
            raise LookupError(name)
    return value


def _there_are(row: Mapping[str, object], name: str, where: Where) -> str:
    if where.hint:
        return f"; {where.hint}"
    if keys_are_data(row):
        return "; the columns are objects that share keys, so their names may be data: not shown"
    names = dotted_names(row, varied=where.varied)
    guess = did_you_mean(name, filter(looks_like_name, names))
    return f"; there are: {listed_names(names)}{guess}"


def listed_names(names: Sequence[str]) -> str:
    """Return names of columns for a message. A file without a header has values in their place, so
    what does not look like a name is not shown."""
    names = [each for each in dict.fromkeys(names) if each.strip()]
    shown = [each for each in names if looks_like_name(each)]
    listed = ", ".join(shown[:MOST_NAMES]) or "none"
    more = f" and {len(shown) - MOST_NAMES} more" if len(shown) > MOST_NAMES else ""
    if hidden := len(names) - len(shown):
        more += f" (and {hidden} that look like values: has the file a header?)"
    return listed + more


def divider(columns: Sequence[str]) -> str | None:
    """Return the delimiter between names that a header with a single column seems to have."""
    found = _DIVIDED.fullmatch("".join(columns)) if len(columns) == 1 else None
    return found[1] if found else None


def looks_like_name(name: str) -> bool:
    """Return whether a column's name is short enough to be one, 40 characters in four words, and
    has no control characters."""
    is_short = len(name) <= MOST_LETTERS and len(name.split()) <= MOST_WORDS
    return is_short and name.isprintable()


def dotted_names(value: object, before: str = "", varied: Container[str] = ()) -> list[str]:
    """Return the names of a row's columns, dotted for what is nested, in a list of objects for its
    first entry. An object whose keys may be data is not opened, nor is one of `varied`."""
    if isinstance(value, list | tuple):
        entries = value[:1] if value and isinstance(value[0], Mapping) else ()
        return [name for each in entries for name in dotted_names(each, f"{before}0.", varied)]
    if (
        not isinstance(value, Mapping)
        or keys_are_data(value)
        or (before and len(value) > MOST_KEYS)
        or before[:-1] in varied
    ):
        return []
    names: list[str] = []
    for key, inner in value.items():
        nested = dotted_names(inner, f"{before}{key}.", varied)
        is_list = isinstance(inner, list | tuple)
        names += nested if nested and not is_list else [f"{before}{key}", *nested]
    return names


def varied_objects(rows: Sequence[object]) -> frozenset[str]:
    """Return the dotted names of the nested objects whose keys may be data because they differ from
    row to row: the first row with an object has less than half of its keys in common with others,
    on average. A key without a value counts as missing."""
    keys_of: defaultdict[str, list[set[str]]] = defaultdict(list)
    for row in rows:
        for name, keys in _objects(row):
            if keys:
                keys_of[name].append(keys)
    found = set()
    for name, (first, *others) in keys_of.items():
        shares = [len(first & other) / len(first | other) for other in others]
        if sum(shares) < len(shares) / 2:
            found.add(name)
    return frozenset(found)


def _objects(value: object, before: str = "") -> Iterator[tuple[str, set[str]]]:
    """Yield the dotted names and the keys of the objects in a row, in a list of its first entry."""
    if isinstance(value, list | tuple):
        yield from _objects(value[0] if value else None, f"{before}0.")
    elif isinstance(value, Mapping):
        if before:
            yield before[:-1], {key for key, inner in value.items() if inner is not None}
        for key, inner in value.items():
            yield from _objects(inner, f"{before}{key}.")


def keys_are_data(value: Mapping[str, object]) -> bool:
    """Return whether the keys of an object may be data, such as the names of people: they lead to
    several objects, or lists of objects, that share a key."""
    firsts = [each[0] if isinstance(each, list) and each else each for each in value.values()]
    objects = [set(each) for each in firsts if isinstance(each, Mapping)]
    return 2 <= len(firsts) == len(objects) and bool(set.intersection(*objects))


def text_of(row: Mapping[str, object], column: str, where: Where) -> str:
    """Return a row's text, "" for null, with question marks for lone surrogates, which no model
    reads. Raises InputError that names the row if the column is missing or holds no text."""
    value = column_of(row, column, where)
    if value is not None and not isinstance(value, str):
        raise InputError(f"{where}: column '{column}' is not a text{_way_in(value, column, where)}")
    return valid_unicode(value or "")


def _way_in(value: object, column: str, where: Where) -> str:
    """Return the part of an error that says how to name a value within a list or an object."""
    if isinstance(value, bytes):
        return " but bytes; write the column as text, in pandas by .str.decode('utf-8')"
    if not isinstance(value, Mapping | list | tuple):
        return ""
    if where.hint:
        return f"; {where.hint}"
    is_list = not isinstance(value, Mapping)
    first = value[0] if is_list and value else None
    if isinstance(first, Mapping) and not first.keys().isdisjoint(ROLE_KEYS):
        return " but a list of messages, which `turns` reads in place of `text`"
    what = f" but a list, whose first entry is {column}.0" if is_list else " but an object"
    names = dotted_names(value, f"{column}.", where.varied) if where.row == 1 else []
    return what + (f"; there are: {listed_names(names)}" if names else "")


def is_empty(value: object) -> bool:
    """Return whether a text is empty: null, or nothing that can be seen. This is the one rule for
    `data.empty`."""
    return value is None or (isinstance(value, str) and not _VISIBLE.search(value))


def is_code(name: str) -> bool:
    """Return whether a label's name is a number, which says nothing in a prompt."""
    return name.replace(".", "").lstrip("-").isdecimal()


def words_of(name: str) -> str:
    """Return the words of a label such as `card_lost`, as a prompt says them; "" for a label
    without underscores between its words."""
    return name.replace("_", " ") if re.fullmatch(r"[^\W_]+(_[^\W_]+)+", name) else ""


OTHER = "other"
"""If this is one of the public values of an attribute, it stands for all other ones."""


def label_name(value: object) -> str:
    """Return a label's name. A name's name is itself. A value that JSON does not have, such as a
    date, goes by its text."""
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return valid_unicode(str(value))


def value_name(value: object, names: Container[str] = ()) -> str:
    """Return the name of a public value of a column: that of a label, and `null` for null and NaN.
    A whole number with or without `.0` goes by the one of `names`: a column of numbers in which one
    is missing has 1.0 for 1."""
    name = "null" if value is None or value != value else label_name(value)
    if name not in names and re.fullmatch(r"-?\d+(\.0)?", name):
        other = name.removesuffix(".0") if name.endswith(".0") else f"{name}.0"
        return other if other in names else name
    return name


def check_labels(labels: Sequence[object]) -> None:
    """Raise ValueError for labels that the release could not keep or tell apart."""
    for label in labels:
        if not isinstance(label, Label):
            raise ValueError("a label is a text, a number, true or false")
        if isinstance(label, float) and not math.isfinite(label):
            raise ValueError("a label is no infinity and not .nan")
    [(name, count)] = Counter(map(label_name, labels)).most_common(1) or [("", 0)]
    if count > 1:
        raise ValueError(f"{name!r} is given twice; CSV tells no text from a value")
    numbers = [label for label in labels if type(label) in (int, float)]
    if len(set(numbers)) < len(numbers):
        raise ValueError("two are the same number, as 1 and 1.0 are")


def plain_value(value: object, column: str, where: Where) -> object:
    """Return a column's value. Raises InputError for null, not-a-number, a list, and an object: it
    has no name, because its parts have no order."""
    if value is None:
        raise InputError(f"{where}: column '{column}' is null")
    if not _is_plain(value):
        way_in = _way_in(value, column, where)
        raise InputError(f"{where}: column '{column}' holds no text and no number{way_in}")
    return value


def _is_plain(value: object) -> bool:
    return not isinstance(value, Mapping | list | tuple | bytes | None) and value == value


def is_known(value: object, by_name: Mapping[str, Label]) -> bool:
    """Return whether a row's label has a name of `by_name`; null, not-a-number, a list and an
    object have none."""
    return _is_plain(value) and label_name(value) in by_name


def match_label(value: object, by_name: Mapping[str, Label], column: str, where: Where) -> str:
    """Return the name of a row's label, one of `by_name` and of the same type. The cells of CSV and
    the names of folders are all texts, and match by name. Raises InputError."""
    name = label_name(plain_value(value, column, where))
    if name not in by_name:
        raise InputError(f"{where}: the label is not one of data.labels")
    label = by_name[name]
    if isinstance(value, Label) and is_of_other_type(value, label, column, where):
        raise InputError(f"{where}: the label is {_kind(value)}, and in data.labels {_kind(label)}")
    return name


def is_of_other_type(value: object, label: Label, column: str, where: Where) -> bool:
    """Return whether a value that goes by a label's name is of another type. The cells of CSV and
    the names of folders have no type, nor have values that JSON does not have."""
    if type(value) is type(label) or not isinstance(value, Label) or not where.typed:
        return False
    return not (isinstance(value, str) and column in folder_columns(where.file))


def _kind(label: Label) -> str:
    if isinstance(label, bool):
        return "true or false"
    return "a text" if isinstance(label, str) else "a number"


def cut_share(rows: Iterable[Mapping[str, object]]) -> float | None:
    """Return the share of a release's records that reached the most tokens of a text; None for
    records that do not say how they ended."""
    ended = [row["finish_reason"] for row in rows if row.get("finish_reason") is not None]
    return ended.count("length") / len(ended) if ended else None


def cut_advice(share: float | None, method: Mapping[str, object]) -> str | None:
    """Return the key to turn if this share of the texts reached the most tokens of a text; None for
    a small or an unknown share. `method` is as in run.json, {} for an unknown one."""
    if share is None or share < MANY_CUT:
        return None
    section, last = "method", method
    if isinstance(chained := method.get("methods"), list | tuple):
        section, last = f"methods.{len(chained) - 1}", chained[-1]
    known: dict[object, str] = {
        None: "max_tokens (dp_sgd: max_length)",
        "dp_sgd": "max_length",
    }
    key = known.get(last.get("name"), "max_tokens")
    return (
        f"{share:.0%} of the texts reach {section}.{key}: raise it if your records are longer "
        "(`dpray check` says), else the model rambles and a lower one costs less"
    )
