"""The released records of a run, and a budget for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dpray.config.config import Config
from dpray.ledger.ledger import Ledger
from dpray.types import Budget


def lines(run: Config) -> list[dict[str, Any]]:
    """The released records."""
    path = Path(run.output.path) / "synthetic.jsonl"
    return [json.loads(line) for line in path.open()]


def open_budget(run: Config) -> Ledger:
    """With room for more than the run."""
    ledger = Ledger.create_or_open(run.privacy.ledger)
    ledger.create_dataset("notes", Budget(100, 1e-3), "record", "add_or_remove_one")
    return ledger
