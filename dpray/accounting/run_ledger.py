"""A run that charges nothing has a ledger too."""

from __future__ import annotations

from collections.abc import Iterable

from dpray.accounting.hash_chain import Entry
from dpray.accounting.ledger import Ledger
from dpray.accounting.ledger_account import Account
from dpray.accounting.ledger_queries import PAGE, Listing, Place


class NullLedger(Ledger):
    """Keeps nothing. A run without noise claims nothing, so it is charged nothing; nor does it ask
    for a charge or its last commit."""

    def __init__(self) -> None:
        """Open no database."""

    def account(self, dataset: str) -> Account | None:
        return None

    def begin(self, key: str, attempt_id: str, units: Iterable[str]) -> None:
        pass

    def publish_many(self, key: str, attempt_id: str, releases: Iterable[tuple[str, str]]) -> int:
        return 0

    def fail(self, key: str, unit: str, attempt_id: str, reason_class_name: str) -> bool:
        return False

    def commit(self, key: str) -> bool:
        return False

    def page(self, listing: Listing, key: str, after: Place, limit: int = PAGE) -> list[Entry]:
        return []

    def counts(self, key: str) -> dict[str, int]:
        return dict.fromkeys(("started", "starts", "published", "failed", "committed"), 0)
