"""A ledger with one data set, on SQLite and on PostgreSQL."""

from __future__ import annotations

import pytest

from dpray.ledger.ledger import Ledger
from tests.ledger.charges import BUDGET, STATED_FOR


@pytest.fixture
def ledger(url: str) -> Ledger:
    ledger = Ledger.create_or_open(url)
    ledger.create_dataset("notes", BUDGET, *STATED_FOR)
    return ledger
