"""Each round of `make chaos` leaves a line of JSON in out/chaos.jsonl."""

from __future__ import annotations

import json
import os
from typing import Any

from tests.conftest import ROOT

KEPT = ROOT / "out" / "chaos.jsonl"

ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "1"))
"""The number of rounds of each method."""

FIRST = int(os.environ.get("CHAOS_FIRST", "0"))
"""The number of the first round, or of the first point. Those before it were made by an earlier
command, which was broken off: the `round` of its last line in out/chaos.jsonl, and one."""

NUMBERS = range(FIRST, max(FIRST, ROUNDS))
"""The numbers of the rounds that this command makes."""


def database_of(number: int) -> str:
    """Return the database of a round: they take turns."""
    return ["sqlite", "postgresql"][number % 2]


def keep(**line: Any) -> None:
    KEPT.parent.mkdir(exist_ok=True)
    with open(KEPT, "a") as file:
        file.write(json.dumps(line) + "\n")
