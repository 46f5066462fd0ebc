"""Names, keys and values are checked before the ledger keeps them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from dpray.accounting.event import canonical_json
from dpray.types import InputError

KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@=+-]{0,199}")
CLASS_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,99}")
SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9._ -]{1,200}")


def check_name(what: str, name: str) -> str:
    """Return the name of a new data set or tenant, without needless blanks."""
    if not (_NAME.fullmatch(name) and name.strip()):
        raise InputError(
            f"the name of a {what} has 1 to 200 letters (A to Z), digits, blanks, dots, hyphens "
            "and underscores"
        )
    return " ".join(name.split())


def check(what: str, text: str, pattern: re.Pattern[str]) -> None:
    # The text is not repeated: what breaks the rule may be what the rule keeps out.
    if not pattern.fullmatch(text):
        raise InputError(f"{what} has to match {pattern.pattern}")


def check_public(what: str, texts: Iterable[str]) -> None:
    if not all(0 < len(text) <= 200 and text.isprintable() for text in texts):
        raise InputError(f"the name of a {what} has 1 to 200 printable characters")


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values as reading the ledger gives them."""
    read: dict[str, Any] = json.loads(canonical_json(values))
    return read
