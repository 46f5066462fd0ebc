"""The charge that most tests of the ledger make: ten of them fill a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from dpray.accounting.event import NEIGHBORING_RELATION
from dpray.accounting.events import DiscreteLaplace
from dpray.ledger.chain import Entry
from dpray.ledger.ledger import Ledger
from dpray.types import Budget

STATED_FOR = ("record", NEIGHBORING_RELATION)
BUDGET, ASKED = Budget(1.0, 1e-6), Budget(0.1, 1e-7)
TENTH = DiscreteLaplace(10.0, 1)
SHA = "a" * 64


def reserve(
    ledger: Ledger,
    key: str,
    dataset: str = "notes",
    asked: Budget = ASKED,
    files: Iterable[bytes] = (),
) -> Entry:
    [reservation] = ledger.reserve(dataset, {key: (TENTH, asked)}, *STATED_FOR, files)
    return reservation


def publish(ledger: Ledger, unit: str, attempt: str = "attempt-1", sha: str = SHA) -> int:
    return ledger.publish("run", attempt, [(unit, sha)])


@contextmanager
def listener(event: str, act: Callable[..., Any]) -> Iterator[None]:
    """Have an event of any connection call `act`."""
    sa.event.listen(sa.Engine, event, act)
    try:
        yield
    finally:
        sa.event.remove(sa.Engine, event, act)
