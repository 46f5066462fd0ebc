"""The label that a value was probably meant to be, and how the two differ.

Labels that look alike may differ in their Unicode form, in blanks, in case, or in how a number or a
date is written.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from difflib import SequenceMatcher, get_close_matches
from functools import reduce
from itertools import combinations

MIDNIGHT = re.compile(r"(?<=\d{4}-\d\d-\d\d)[ T]?00:00(:00(\.0+)?)?(Z|\+00:00)?\Z", re.IGNORECASE)

SPELLING, COMMA = "spelling", "comma"


def _without_blanks(name: str) -> str:
    """Return the name without blanks and without characters that nobody sees."""
    return "".join(c for c in name if not c.isspace() and unicodedata.category(c) != "Cf")


def _plain_value(name: str) -> str:
    """Return a number, a truth value or a day as it is written in short: `1` for 1.0 and true."""
    name = {"true": "1", "false": "0"}.get(name.strip().lower(), name.strip())
    with suppress(ValueError, OverflowError):
        number = float(name)
        return str(int(number)) if number.is_integer() else str(number)
    return MIDNIGHT.sub("", name)


WAYS: dict[str, Callable[[str], str]] = {
    "blanks": _without_blanks,
    "case": str.casefold,
    "Unicode form": lambda name: unicodedata.normalize("NFKC", name),
    "the form of a number or date": _plain_value,
}
"""Differences between two names, each with a function that takes it away."""


def nearest(name: str, labels: Collection[str]) -> tuple[str, str] | None:
    """Return the label nearest to a name that is not in `labels`, and the difference: some of
    `WAYS`, the spelling, or a comma, if labels were given where one with commas was meant. None if
    no label is near."""
    alike = [label for label in labels if _plain(label, [*WAYS]) == _plain(name, [*WAYS])]
    alike.sort(key=lambda label: -SequenceMatcher(None, label.lower(), name.lower()).ratio())
    for size in range(1, len(WAYS) + 1):
        for ways in combinations(WAYS, size):
            for label in alike:
                if _plain(label, ways) == _plain(name, ways):
                    return label, " and ".join(ways)
    parts = [part.strip() for part in name.split(",")]
    if len(parts) > 1 and {*parts} <= {*labels}:
        return parts[0], COMMA
    # Other digits make another label, not another spelling of it.
    same_digits = [label for label in labels if _digits(label) == _digits(name)]
    found = get_close_matches(name, same_digits, n=1, cutoff=0.8)
    return (found[0], SPELLING) if found else None


def _digits(name: str) -> list[str]:
    return re.findall(r"\d", name)


def _plain(name: str, ways: Sequence[str]) -> str:
    return reduce(lambda plain, way: WAYS[way](plain), ways, name)


def spelled(label: bool | int | float | str) -> str:
    """Return a label as it can be written in the list of `data.labels`: a text in quotes, with a
    code for each character that is not seen or that changes the one before it."""
    return "".join(
        f"\\u{ord(c):04x}" if _is_hidden(c) and ord(c) < 1 << 16 else c
        for c in json.dumps(label, ensure_ascii=False)
    )


def _is_hidden(character: str) -> bool:
    return not character.isprintable() or unicodedata.combining(character) > 0


def spelled_list(labels: Collection[bool | int | float | str]) -> str:
    """Return a list of labels as `data.labels` takes it."""
    return f"[{', '.join(map(spelled, labels))}]"
