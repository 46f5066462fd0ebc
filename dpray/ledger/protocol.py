"""The ledger as a run sees it, and the two ledgers that keep nothing of their own.

The guarantee holds because of this order: `reserve` (durable), `begin` a unit (durable), only then
touch the private data, then `publish` the unit's one release. A reservation is spent from the
moment it is written, whatever becomes of the run. Every operation may be repeated: the same key
with the same content gives the same answer, with other content it raises `LedgerConflict`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, Protocol

from dpray.accounting.event import Event
from dpray.ledger.account import Account
from dpray.ledger.chain import Entry
from dpray.ledger.errors import LedgerConflict
from dpray.ledger.operations import Begin, Commit, Fail, Operation, Publish, Reserve
from dpray.types import Budget

Listing = Literal["begin", "unfinished", "publish", "fail"]
"""A kind of entries, or the `begin`s of units that were neither published nor failed."""

Place = tuple[str, str]
"""The (unit, attempt) of the last row of a page."""

PAGE = 10_000
"""A run may have a million units, so they are listed in pages of this size."""


class RunLedger(Protocol):
    """The operations of a run.

    They are carried out by `write`, and units are listed by `page`: a ledger has both of its own,
    and `account`, `counts`, `last_commit` and `close`.

    Every method raises `LedgerError` if the database fails (full disk, lost connection, locked for
    too long): the operation may or may not have happened, and repeating it is safe.
    """

    def reserve(
        self,
        dataset: str,
        charges: Mapping[str, tuple[Event, Budget]],
        privacy_unit: str,
        neighboring_relation: str,
        files: Iterable[bytes] = (),
        tenant: str | None = None,
    ) -> list[Entry]:
        """Make a run's charges, all or none, durably, before it touches the data, and return their
        entries. They are never given back.

        `charges` maps the charge's key to the event and to what the run's report will claim for it,
        which has to cover the event's own cost at that delta. `files` are the digests of the data's
        files: the ledger binds each to the first data set that it is charged to. `tenant` is who
        the run is made for. The charge is drawn on every ancestor of the data set too. Raises
        `BudgetRefused` (nothing is charged anywhere), `LedgerConflict`, and `InputError` for an
        unknown data set or tenant, a privacy unit or relation other than the budget's, or a file of
        another data set.
        """
        stated_for = privacy_unit, neighboring_relation
        operation = Reserve(dataset, charges, *stated_for, tuple(files), tenant)
        made: list[Entry] = self.write(operation)
        return made

    def begin(self, key: str, attempt_id: str, units: Iterable[str]) -> None:
        """Record, durably and before their data is touched, that an attempt starts these units.

        Raises `LedgerConflict`, and records none of them, if one is published (`AlreadyPublished`)
        or has failed, or if the run is committed.
        """
        self.write(Begin(key, attempt_id, tuple(dict.fromkeys(units))))

    def publish(self, key: str, attempt_id: str, releases: Iterable[tuple[str, str]]) -> int:
        """Record the one release of each unit, by (unit, SHA-256 of its file), all or none: the
        files may be put in place once this returns.

        Returns how many were not there before: this attempt may publish the very same file again.
        Raises `AlreadyPublished` for another attempt, `LedgerConflict` for another file, a unit
        that has failed, or a committed run.
        """
        return int(self.write(Publish(key, attempt_id, tuple(sorted(set(releases))))))

    def fail(self, key: str, unit: str, attempt_id: str, reason_class_name: str) -> bool:
        """Record that a unit failed: it is never repeated. Of the error, only its class's name is
        kept.

        Returns True the first time; the first failure of a unit stands, and later ones answer
        False. Raises `AlreadyPublished`, and `LedgerConflict` for a committed run.
        """
        return bool(self.write(Fail(key, unit, attempt_id, reason_class_name)))

    def commit(self, key: str) -> bool:
        """Close a run: nothing begins or is published under it from now on. Returns True the first
        time."""
        return bool(self.write(Commit(key)))

    def write(self, operation: Operation) -> Any:
        """Carry out one operation, durably, and return its answer."""
        ...

    def last_commit(self, key: str) -> Entry:
        """Return the entry that closed a run, after which none of its own comes. Raises
        `LedgerConflict` if it is not closed."""
        ...

    def account(self, dataset: str) -> Account | None:
        """Return a data set's budget and charges, or None if it has no budget."""
        ...

    def counts(self, key: str) -> dict[str, int]:
        """Return how many units of a run were `started`, `published` and `failed`, how many
        `starts` there were in all, and whether (1 or 0) it is `committed`."""
        ...

    def page(self, listing: Listing, key: str, after: Place, limit: int = PAGE) -> list[Entry]:
        """Return at most `limit` entries of a listing that come after a place, in their order by
        unit and attempt; ("", "") is the beginning."""
        ...

    def close(self) -> None:
        """Give up the connections to the database."""
        ...

    def started(self, key: str) -> Iterator[Place]:
        """Yield (unit, attempt) of every start; a unit that was repeated comes once for each
        attempt."""
        return ((entry.unit, entry.attempt) for entry in self._listed("begin", key))

    def unfinished(self, key: str) -> Iterator[Place]:
        """Yield the starts of units that neither were published nor failed: running, or lost."""
        return ((entry.unit, entry.attempt) for entry in self._listed("unfinished", key))

    def published(self, key: str) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yield each published unit with (the attempt that published it, its file's SHA-256)."""
        for entry in self._listed("publish", key):
            release = entry.values()
            yield entry.unit, (release["attempt"], release["sha256"])

    def failed(self, key: str) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yield each unit that failed, with (attempt, name of the error's class)."""
        for entry in self._listed("fail", key):
            failure = entry.values()
            yield entry.unit, (failure["attempt"], failure["reason"])

    def _listed(self, listing: Listing, key: str) -> Iterator[Entry]:
        after = ("", "")
        while rows := self.page(listing, key, after):
            yield from rows
            after = (rows[-1].unit, rows[-1].attempt)


class NullLedger(RunLedger):
    """The ledger of a run without noise, which claims nothing and is charged nothing. It keeps
    nothing."""

    def write(self, operation: Operation) -> int:
        return 0

    def page(self, listing: Listing, key: str, after: Place, limit: int = PAGE) -> list[Entry]:
        return []

    def account(self, dataset: str) -> None:
        return None

    def counts(self, key: str) -> dict[str, int]:
        return dict.fromkeys(("started", "starts", "published", "failed", "committed"), 0)

    def last_commit(self, key: str) -> Entry:
        raise LedgerConflict("a run that charges nothing is not committed")

    def close(self) -> None:
        pass


class StageLedger(RunLedger):
    """The ledger of one method of a chained run: of the units in `ledger` it shows those whose
    names begin with `prefix`, without the prefix. Charges are made under the run's own keys."""

    def __init__(self, ledger: RunLedger, prefix: str) -> None:
        self._ledger, self._prefix = ledger, prefix

    def write(self, operation: Operation) -> Any:
        return self._ledger.write(operation.with_prefix(self._prefix))

    def page(self, listing: Listing, key: str, after: Place, limit: int = PAGE) -> list[Entry]:
        place = after if after == ("", "") else (self._prefix + after[0], after[1])
        # A database may sort the names of other methods' units in between.
        while entries := self._ledger.page(listing, key, place, limit):
            if own := [entry for entry in entries if entry.unit.startswith(self._prefix)]:
                return [replace(e, unit=e.unit.removeprefix(self._prefix)) for e in own]
            place = (entries[-1].unit, entries[-1].attempt)
        return []

    def account(self, dataset: str) -> Account | None:
        return self._ledger.account(dataset)

    def counts(self, key: str) -> dict[str, int]:
        starts = [unit for unit, _ in self.started(key)]
        return self._ledger.counts(key) | {
            "started": len(set(starts)),
            "starts": len(starts),
            "published": sum(1 for _ in self.published(key)),
            "failed": sum(1 for _ in self.failed(key)),
        }

    def last_commit(self, key: str) -> Entry:
        return self._ledger.last_commit(key)

    def close(self) -> None:
        """Leave the ledger open: the run closes it."""
