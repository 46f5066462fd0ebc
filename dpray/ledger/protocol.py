"""The ledger as a run sees it, and the ledger of a run without noise.

The guarantee rests on this order: `reserve` (durable), `begin` a unit (durable), only then touch
the private data, then `publish` the unit's one release. A reservation is spent once it is written,
also if the run fails. Every operation may be repeated: the same key with the same content gives the
same answer, with other content it raises `LedgerConflict`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from itertools import groupby
from operator import itemgetter
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar

import sqlalchemy as sa

from dpray.accounting.event import Event
from dpray.ledger import queries
from dpray.ledger.account import Account
from dpray.ledger.chain import Entry
from dpray.ledger.operations import (
    Begin,
    Commit,
    CreateDataset,
    Fail,
    Operation,
    Publish,
    RaiseBudget,
    Reserve,
)
from dpray.types import Budget, LedgerConflict

Kind = Literal["begin", "publish", "fail"]
"""A kind of entries that a unit has."""

Place = tuple[str, str]
"""A unit and the attempt that started it."""

P = ParamSpec("P")
T = TypeVar("T")


class RunLedger(ABC):
    """The operations and questions of a run. An implementation has `write`, `read` and `close`.

    Every method raises `LedgerError` if the database fails (full disk, lost connection, locked for
    too long): the operation may or may not have happened, and repeating it is safe.
    """

    prefix: str = ""
    """The ledger reads and writes only units whose names begin with this, and leaves it out."""

    @abstractmethod
    def write(self, operation: Operation) -> Any:
        """Carry out one operation, durably, and return its answer."""

    @abstractmethod
    def read(
        self,
        query: Callable[Concatenate[sa.Connection, P], T],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> T:
        """Return what a function of `queries` finds in one snapshot of the ledger."""

    @abstractmethod
    def close(self) -> None:
        """Give up the connections to the database."""

    def with_prefix(self, prefix: str) -> Self:
        """Return this ledger for the units of one method in a chain. Charges are made under the
        run's own keys. The connections are shared: close the original alone."""
        view = copy(self)
        view.prefix = prefix
        return view

    def create_dataset(
        self,
        name: str,
        budget: Budget,
        privacy_unit: str,
        neighboring_relation: str,
        composition: str = "basic",
        order: float | None = None,
    ) -> None:
        """Give a data set its budget, once and for all.

        A name that differs in case or blanks alone means the same data set. `composition` is the
        rule by which the runs' costs add up: "basic", or "renyi" at the Rényi `order`. Raises
        `InputError`, also for a data set that has another budget.
        """
        stated_for = privacy_unit, neighboring_relation
        self.write(CreateDataset(name, budget, *stated_for, composition, order))

    def raise_budget(
        self, dataset: str, reason: str, *, epsilon: float | None = None, delta: float | None = None
    ) -> Account:
        """Make the budget of a data set larger, on record, and return its account. A part that is
        not given stays as it is; so does the rule of composition, with its order.

        From then on everything that was ever released from the data set has the guarantee of the
        new budget, and no stronger one. Raises `InputError` for an unknown data set, and for a
        budget that is not larger. The same raise twice is one.
        """
        raised: Account = self.write(RaiseBudget(dataset, epsilon, delta, reason))
        return raised

    def reserve(
        self,
        dataset: str,
        charges: Mapping[str, tuple[Event, Budget]],
        privacy_unit: str,
        neighboring_relation: str,
        files: Iterable[bytes] = (),
        *,
        is_trial: bool = False,
        new_budget: Budget | None = None,
    ) -> list[Entry]:
        """Make a run's charges, all or none, durably, before it touches the data, and return their
        entries. They are never given back.

        `charges` maps the charge's key to the event and to the budget that the run's report will
        claim for it, which has to cover the event's own cost at that delta. `files` are the digests
        of the data's files: the ledger binds each to the first data set that it is charged to. A
        trial charges nothing, and returns only charges that were made before. With `new_budget`, a
        data set that the ledger does not have is created with it, by the same write.

        Raises `BudgetRefused` (nothing is charged), `LedgerConflict`, and `InputError` for
        an unknown data set, a privacy unit or relation other than the budget's, or a file of
        another data set.
        """
        stated_for = privacy_unit, neighboring_relation
        operation = Reserve(dataset, charges, *stated_for, tuple(files), is_trial, new_budget)
        made: list[Entry] = self.write(operation)
        return made

    def begin(self, charge_key: str, attempt_id: str, units: Iterable[str]) -> None:
        """Record, durably and before their data is touched, that an attempt starts these units.

        Raises `LedgerConflict`, and records none of them, if one is published (`AlreadyPublished`)
        or has failed, or if the run is committed.
        """
        own = tuple(self.prefix + unit for unit in dict.fromkeys(units))
        self.write(Begin(charge_key, attempt_id, own))

    def publish(self, charge_key: str, attempt_id: str, releases: Iterable[tuple[str, str]]) -> int:
        """Record the one release of each unit, by (unit, SHA-256 of its file), all or none: the
        files may be put in place once this returns.

        Returns the number of new releases: this attempt may publish the very same file again.
        Raises `AlreadyPublished` for another attempt, `LedgerConflict` for another file, a unit
        that has failed, or a committed run.
        """
        own = sorted({(self.prefix + unit, sha256) for unit, sha256 in releases})
        return int(self.write(Publish(charge_key, attempt_id, tuple(own))))

    def fail(self, charge_key: str, unit: str, attempt_id: str, reason_class_name: str) -> bool:
        """Record that a unit failed: it is never repeated. Of the error, only its class's name is
        kept.

        Returns True the first time; the first failure of a unit stands, and later ones answer
        False. Raises `AlreadyPublished`, and `LedgerConflict` for a committed run.
        """
        return bool(self.write(Fail(charge_key, self.prefix + unit, attempt_id, reason_class_name)))

    def commit(self, charge_key: str) -> bool:
        """Close a run: nothing begins or is published under it from now on. Returns True the first
        time."""
        return bool(self.write(Commit(charge_key)))

    def is_reserved(self, charge_key: str) -> bool:
        """Return whether the ledger holds the charge with this key."""
        return self.read(queries.find, "reserve", charge_key) is not None

    def last_commit(self, charge_key: str) -> Entry:
        """Return the entry that closed a run, its last one. Raises `LedgerConflict` for an open
        run."""
        if (entry := self.read(queries.find, "commit", charge_key)) is None:
            raise LedgerConflict("the run is not committed")
        return entry

    def counts(self, charge_key: str) -> dict[str, int]:
        """Return how many units of a run were `started`, `published` and `failed`, the `starts` in
        all, and whether (1 or 0) it is `committed`."""
        return self.read(queries.count, charge_key, self.prefix)

    def account(self, dataset: str) -> Account | None:
        """Return a data set's budget and charges, or None if it has no budget."""
        return self.read(queries.find_account, dataset)

    def names(self) -> list[str]:
        """Return the names of the data sets that the ledger has."""
        return self.read(queries.dataset_names)

    def started(self, charge_key: str) -> Iterator[Place]:
        """Yield (unit, attempt) of every start, sorted: one for each attempt at a unit."""
        return ((unit, entry.attempt) for unit, entry in self._units("begin", charge_key))

    def repeated(self, charge_key: str) -> Iterator[str]:
        """Yield the units that were begun more than once; not all names are held at once."""
        for unit, attempts in groupby(self.started(charge_key), key=itemgetter(0)):
            if sum(1 for _ in attempts) > 1:
                yield unit

    def unfinished(self, charge_key: str) -> Iterator[Place]:
        """Yield the starts of units that neither were published nor failed: running, or lost."""
        ended = {unit for unit, _ in self._units("publish", charge_key)}
        ended |= {unit for unit, _ in self._units("fail", charge_key)}
        return (start for start in self.started(charge_key) if start[0] not in ended)

    def published(self, charge_key: str) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yield each published unit with (the attempt that published it, its file's SHA-256)."""
        for unit, entry in self._units("publish", charge_key):
            release = entry.values()
            yield unit, (release["attempt"], release["sha256"])

    def failed(self, charge_key: str) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yield each unit that failed, with (attempt, name of the error's class)."""
        for unit, entry in self._units("fail", charge_key):
            failure = entry.values()
            yield unit, (failure["attempt"], failure["reason"])

    def _units(self, kind: Kind, charge_key: str) -> Iterator[tuple[str, Entry]]:
        """Yield a run's units with their entries of one kind, in pages: they may be a million."""
        after = ("", "")
        while rows := self.read(queries.page, kind, charge_key, after):
            for entry in rows:
                if entry.unit.startswith(self.prefix):
                    yield entry.unit.removeprefix(self.prefix), entry
            after = (rows[-1].unit, rows[-1].attempt)


class NullLedger(RunLedger):
    """The ledger of a run without noise, which claims nothing and is charged nothing. It keeps
    nothing, so it has no units and no counts."""

    def write(self, operation: Operation) -> int:
        return 0

    def read(self, query: Any, *arguments: Any, **options: Any) -> Any:
        empty = {queries.count: Counter[str](), queries.page: [], queries.dataset_names: []}
        return empty.get(query)

    def close(self) -> None:
        pass
