"""The ledgers of runs that charge nothing, and of the methods of a chained run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from dpray.accounting.event import Event
from dpray.ledger.account import Account
from dpray.ledger.chain import Entry
from dpray.ledger.ledger import Ledger
from dpray.ledger.queries import PAGE, Listing, Place
from dpray.types import Budget


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


class StageLedger(Ledger):
    """A `StageLedger` is a ledger as one method of a chained run sees it: it shows the units whose
    names begin with `prefix` in the ledger, without the prefix, and no others. Charges are made
    under the run's own keys."""

    def __init__(self, ledger: Ledger, prefix: str) -> None:
        self._ledger, self._prefix = ledger, prefix

    def reserve(
        self,
        dataset: str,
        charges: Mapping[str, tuple[Event, Budget]],
        privacy_unit: str,
        neighboring_relation: str,
        files: Iterable[bytes] = (),
        tenant: str | None = None,
    ) -> list[Entry]:
        stated_for = privacy_unit, neighboring_relation
        return self._ledger.reserve(dataset, charges, *stated_for, files, tenant)

    def begin(self, key: str, attempt_id: str, units: Iterable[str]) -> None:
        self._ledger.begin(key, attempt_id, map(self._whole, units))

    def publish_many(self, key: str, attempt_id: str, releases: Iterable[tuple[str, str]]) -> int:
        whole = ((self._whole(unit), sha256) for unit, sha256 in releases)
        return self._ledger.publish_many(key, attempt_id, whole)

    def fail(self, key: str, unit: str, attempt_id: str, reason_class_name: str) -> bool:
        return self._ledger.fail(key, self._whole(unit), attempt_id, reason_class_name)

    def page(self, listing: Listing, key: str, after: Place, limit: int = PAGE) -> list[Entry]:
        place = after if after == ("", "") else (self._whole(after[0]), after[1])
        # A database may sort the names of other methods' units in between.
        while entries := self._ledger.page(listing, key, place, limit):
            if own := [entry for entry in entries if entry.unit.startswith(self._prefix)]:
                return [replace(e, unit=e.unit.removeprefix(self._prefix)) for e in own]
            place = (entries[-1].unit, entries[-1].attempt)
        return []

    def counts(self, key: str) -> dict[str, int]:
        starts = [unit for unit, _ in self.started(key)]
        return self._ledger.counts(key) | {
            "started": len(set(starts)),
            "starts": len(starts),
            "published": sum(1 for _ in self.published(key)),
            "failed": sum(1 for _ in self.failed(key)),
        }

    def _whole(self, unit: str) -> str:
        return self._prefix + unit
