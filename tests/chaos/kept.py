"""Each round of `make chaos` leaves a line of JSON in out/chaos.jsonl."""

from __future__ import annotations

import json
import os
from typing import Any

from tests.conftest import ROOT

KEPT = ROOT / "out" / "chaos.jsonl"

ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "1"))
"""The number of rounds of each method."""


def database_of(number: int) -> str:
    """Return the database of a round: they take turns."""
    return ["sqlite", "postgresql"][number % 2]


def keep(**line: Any) -> None:
    KEPT.parent.mkdir(exist_ok=True)
    with open(KEPT, "a") as file:
        file.write(json.dumps(line) + "\n")
