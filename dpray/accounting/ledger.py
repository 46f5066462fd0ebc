"""The ledger durably records what every data set has spent, and which batches were started and
published.

The guarantee holds because of this order: `reserve` (durable), `begin` a batch (durable), only then
touch the private data, then publish the batch's one release. A reservation is spent from the moment
it is written, whatever becomes of the run. Every operation may be repeated: the same key with the
same content gives the same answer, with other content it raises `LedgerConflict`.

One reservation pays for a run's whole partition; a batch is one row, and the work of a `reserve` or
a `publish_many` does not grow with the other batches (beyond the index's logarithm).

One set of records has one budget. Its name is the same however it is written, and a file that was
charged to one data set is refused under the name of another. The ledger knows a file by a digest of
all of its bytes under a key of its own: a copy that is edited, sorted, converted or cut in parts is
another file to it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import sqlalchemy as sa

from dpray.accounting import composition as rules
from dpray.accounting import ledger_queries as queries
from dpray.accounting.events import Event
from dpray.accounting.hash_chain import Chain, Entry, canonical_json, now
from dpray.accounting.ledger_account import (
    Account,
    check_price,
    committed,
    problems,
    read_account,
    summaries,
)
from dpray.accounting.ledger_queries import PAGE, Listing, Place
from dpray.accounting.ledger_store import LedgerError, Store, broken_chain, datasets, entries, lock
from dpray.types import Budget, InputError

CHUNK = 500
"""One statement looks up so many rows."""

_NAME = re.compile(r"[A-Za-z0-9._ -]{1,200}")
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@=+-]{0,199}")
_CLASS_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,99}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class LedgerConflict(LedgerError):
    """The ledger has the key already, for something else."""


class AlreadyPublished(LedgerConflict):
    """Another attempt has published this batch: a charge pays for one release of each."""


class Ledger:
    """Keeps the budgets at a URL, `sqlite:///path` or `postgresql://...`.

    Every method raises `LedgerError` if the database fails (full disk, lost connection, locked for
    too long): the operation may or may not have happened, and repeating it is safe.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    @classmethod
    def open(cls, url: str) -> Ledger:
        """Open a ledger that is there. Raises `MissingLedger` if it is not; none is made."""
        return cls(Store(url, create=False))

    @classmethod
    def create_or_open(cls, url: str) -> Ledger:
        """Open the ledger at `url`, and make it if it is not there."""
        return cls(Store(url, create=True))

    def __str__(self) -> str:
        """Return the URL, without its password."""
        return str(self._store)

    def close(self) -> None:
        self._store.close()

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

        A name that differs in case or blanks alone means the same data set. `composition` says how
        the runs' costs add up: "basic", or "renyi" at the Rényi `order`. Raises `InputError`, also
        for a data set that has another budget.
        """
        if composition != rules.RenyiComposition.name and order is not None:
            raise InputError("an order belongs to a budget with the composition renyi")
        try:
            rule = rules.composition(composition, budget, order)
        except ValueError as error:
            raise InputError(f"data set '{name}': {error}") from error
        _check_public("privacy unit", [privacy_unit])
        terms = _plain(Account(name, rule, privacy_unit, neighboring_relation).terms())

        def work(connection: sa.Connection) -> None:
            lock(connection)
            if (chain := self._chain(connection, name)) is None:
                self._new_dataset(connection, name, terms)
                return
            found = queries.find(connection, "create", chain.dataset)
            if found is None:
                raise broken_chain(chain.dataset)
            if found.values() != terms:
                raise InputError(
                    f"data set '{chain.dataset}' has another budget in the ledger already"
                )

        self._store.write(work)

    def account(self, dataset: str) -> Account | None:
        """Return a data set's budget and charges, or None if it has no budget."""
        with self._store.read() as connection:
            name = queries.stored_name(connection, dataset)
            return None if name is None else read_account(connection, name)

    def committed(self, dataset: str) -> Budget:
        """Return what the finished runs of a data set, by its name in the ledger, add up to."""
        with self._store.read() as connection:
            return committed(connection, dataset)

    def names(self) -> list[str]:
        """Return the names of the data sets that the ledger has."""
        with self._store.read() as connection:
            return queries.dataset_names(connection)

    def reserve(
        self,
        dataset: str,
        charges: Mapping[str, tuple[Event, Budget]],
        privacy_unit: str,
        neighboring_relation: str,
        files: Iterable[bytes] = (),
    ) -> list[Entry]:
        """Make a run's charges, all or none, durably, before it touches the data, and return their
        entries. They are never given back.

        `charges` holds, by the charge's key, the event and what the run's report will claim for it,
        which has to cover the event's own cost at that delta. `files` are the digests of the data's
        files: the ledger binds each to the first data set that it is charged to. Raises
        `BudgetRefused` (nothing is charged), `LedgerConflict`, and `InputError` for an unknown data
        set, a privacy unit or relation other than the budget's, or a file of another data set.
        """
        files = list(dict.fromkeys(files))
        requests = {}
        for key, (event, asked) in charges.items():
            _check("a reservation's key", key, _KEY)
            check_price(event, asked)
            requests[key] = _plain(
                {
                    "event": event.to_json(),
                    "epsilon": asked.epsilon,
                    "delta": asked.delta,
                    "privacy_unit": privacy_unit,
                    "neighboring_relation": neighboring_relation,
                }
            )

        def work(connection: sa.Connection) -> list[Entry]:
            chain = self._chain(connection, dataset)
            account = None if chain is None else read_account(connection, chain.dataset)
            if chain is None or account is None:
                raise InputError(f"the ledger has no data set {dataset!r}")
            made = []
            for key, request in requests.items():
                if (entry := queries.find(connection, "reserve", key)) is None:
                    charge = rules.Charge(*charges[key])
                    account = account.admit(charge, privacy_unit, neighboring_relation)
                    entry = chain.append("reserve", key, request, at=now())
                elif entry.dataset != chain.dataset or entry.values() != request:
                    raise LedgerConflict(f"the key '{key}' was reserved for another charge")
                made.append(entry)
            for chunk in _chunks(self._store.digests(connection, files)):
                _bind(connection, chain, chunk)
            self._store.append(connection, chain)
            return made

        return self._store.write(work)

    def is_reserved(self, key: str) -> bool:
        """Return whether this ledger holds the charge with this key."""
        with self._store.read() as connection:
            return queries.find(connection, "reserve", key) is not None

    def begin(self, key: str, attempt_id: str, units: Iterable[str]) -> None:
        """Note, durably and before their data is touched, that an attempt starts these batches.

        Raises `LedgerConflict`, and notes none of them, if one is published (`AlreadyPublished`) or
        has failed, or if the run is committed.
        """
        units = list(dict.fromkeys(units))
        _check("an attempt's id", attempt_id, _KEY)
        _check_public("batch", units)

        def work(connection: sa.Connection) -> None:
            chain = self._open_run(connection, key)
            for chunk in _chunks(units):
                _refuse_published(connection, key, chunk)
                _refuse_failed(connection, key, chunk)
                known = queries.find_units(connection, "begin", key, chunk, attempt_id)
                for unit in chunk:
                    if unit not in known:
                        chain.append("begin", key, {}, unit=unit, attempt=attempt_id)
                self._store.append(connection, chain)

        self._store.write(work)

    def publish_many(self, key: str, attempt_id: str, releases: Iterable[tuple[str, str]]) -> int:
        """Note the one release of each batch, by (unit, SHA-256 of its file), all or none: the
        files may be put in place once this returns.

        Returns how many were not there before: this attempt may publish the very same file again.
        Raises `AlreadyPublished` for another attempt, `LedgerConflict` for another file, a batch
        that has failed, or a committed run.
        """
        distinct = set(releases)
        files = dict(sorted(distinct))
        if len(files) < len(distinct):
            raise LedgerConflict("a batch has one release, not two")
        _check("an attempt's id", attempt_id, _KEY)
        _check_public("batch", files)
        for sha256 in files.values():
            _check("a file's SHA-256", sha256, _SHA256)

        def work(connection: sa.Connection) -> int:
            chain = self._open_run(connection, key)
            length = chain.length
            for chunk in _chunks(files):
                known = queries.find_units(connection, "publish", key, chunk)
                _refuse_failed(connection, key, chunk)
                for unit in chunk:
                    release = {"attempt": attempt_id, "sha256": files[unit]}
                    if unit not in known:
                        chain.append("publish", key, release, unit=unit)
                    elif known[unit]["attempt"] != attempt_id:
                        raise AlreadyPublished(f"batch '{unit}' was published by another attempt")
                    elif known[unit] != release:
                        raise LedgerConflict(f"batch '{unit}' was published with another content")
                self._store.append(connection, chain)
            return chain.length - length

        return self._store.write(work)

    def fail(self, key: str, unit: str, attempt_id: str, reason_class_name: str) -> bool:
        """Note that a batch failed: it is never repeated. Of the error, only its class's name is
        kept.

        Returns True the first time; the first failure of a batch stands, and later ones answer
        False. Raises `AlreadyPublished`, and `LedgerConflict` for a committed run.
        """
        _check("an attempt's id", attempt_id, _KEY)
        _check("the name of an error's class", reason_class_name, _CLASS_NAME)
        _check_public("batch", [unit])

        def work(connection: sa.Connection) -> bool:
            chain = self._open_run(connection, key)
            if queries.find_units(connection, "fail", key, [unit]):
                return False
            _refuse_published(connection, key, [unit])
            failure = {"attempt": attempt_id, "reason": reason_class_name}
            chain.append("fail", key, failure, unit=unit)
            self._store.append(connection, chain)
            return True

        return self._store.write(work)

    def commit(self, key: str) -> bool:
        """Close a run, under which nothing begins or is published from now on. Returns True the
        first time."""

        def work(connection: sa.Connection) -> bool:
            chain = self._run(connection, key)
            if queries.find(connection, "commit", key):
                return False
            chain.append("commit", key, {}, at=now())
            self._store.append(connection, chain)
            return True

        return self._store.write(work)

    def last_commit(self, key: str) -> Entry:
        """Return the entry that closed a run, after which none of its own comes. Raises
        `LedgerConflict` if it is not closed."""
        with self._store.read() as connection:
            entry = queries.find(connection, "commit", key)
        if entry is None:
            raise LedgerConflict("the run is not committed")
        return entry

    def holds(self, dataset: str, sequence: int, head: str) -> bool:
        """Return whether an entry with this hash has this place in the data set's chain. Another
        ledger holds no such entry, nor does one that was restored to an earlier state."""
        with self._store.read() as connection:
            place = (entries.c.dataset == dataset, entries.c.seq == sequence)
            entry = queries.first(connection, sa.select(entries).where(*place))
        return entry is not None and entry.hash == entry.digest() == head

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

    def started(self, key: str) -> Iterator[Place]:
        """Yield (unit, attempt) of every start; a unit that was repeated comes once for each
        attempt."""
        return ((entry.unit, entry.attempt) for entry in self._listed("begin", key))

    def unfinished(self, key: str) -> Iterator[Place]:
        """Yield the starts of units that neither were published nor failed: under way, or lost."""
        return ((entry.unit, entry.attempt) for entry in self._listed("unfinished", key))

    def _listed(self, listing: Listing, key: str) -> Iterator[Entry]:
        after = ("", "")
        while rows := self.page(listing, key, after):
            yield from rows
            after = (rows[-1].unit, rows[-1].attempt)

    def page(self, listing: Listing, key: str, after: Place, limit: int = PAGE) -> list[Entry]:
        """Return at most `limit` entries of a listing that come after a place, in their order by
        unit and attempt; ("", "") is the beginning."""
        place = sa.tuple_(entries.c.unit, entries.c.attempt)
        kind = "begin" if listing == "unfinished" else listing
        query = (
            sa.select(entries)
            .where(entries.c.kind == kind, entries.c.key == key)
            .where(place > sa.tuple_(*map(sa.literal, after)))
            .order_by(entries.c.unit, entries.c.attempt)
            .limit(limit)
        )
        if listing == "unfinished":
            query = query.where(~queries.outcome("publish"), ~queries.outcome("fail"))
        with self._store.read() as connection:
            return [Entry(**row._mapping) for row in connection.execute(query)]

    def counts(self, key: str) -> dict[str, int]:
        """Return how many units of a run were `started`, `published` and `failed`, how many
        `starts` there were in all, and whether (1 or 0) it is `committed`."""
        with self._store.read() as connection:
            return queries.count(connection, key)

    def verify(self) -> list[str]:
        """Recompute every hash, every cost from its event, and every total. Returns what does not
        fit, one line each."""
        with self._store.read() as connection:
            return list(problems(connection))

    def show(self) -> dict[str, Any]:
        """Return `ledger` (the URL, without its password) and `datasets`, a list: see
        `summaries`."""
        with self._store.read() as connection:
            return {"ledger": str(self), "datasets": summaries(connection)}

    def export(self) -> Iterator[dict[str, Any]]:
        """Yield every entry, data set by data set, in the order of its chain."""
        with self._store.read() as connection:
            yield from (entry.to_json() for entry in queries.all_entries(connection))

    def _chain(self, connection: sa.Connection, dataset: str) -> Chain | None:
        """Lock a data set that is whole; None if nothing of it is there."""
        name = queries.stored_name(connection, dataset)
        return None if name is None else self._store.chain(connection, name)

    def _new_dataset(self, connection: sa.Connection, name: str, terms: dict[str, Any]) -> None:
        if not (_NAME.fullmatch(name) and name.strip()):
            raise InputError(
                "the name of a data set has 1 to 200 letters (A to Z), digits, blanks, dots, "
                "hyphens and underscores"
            )
        chain = Chain(" ".join(name.split()))
        chain.append("create", chain.dataset, terms, at=now())
        connection.execute(sa.insert(datasets).values(name=chain.dataset, **chain.end))
        self._store.append(connection, chain)

    def _run(self, connection: sa.Connection, key: str) -> Chain:
        """Lock the data set that a reservation was made on."""
        reservation = queries.find(connection, "reserve", key)
        if reservation is None:
            raise LedgerConflict(f"the ledger has no reservation '{key}'")
        return self._store.chain(connection, reservation.dataset)

    def _open_run(self, connection: sa.Connection, key: str) -> Chain:
        chain = self._run(connection, key)
        if queries.find(connection, "commit", key):
            raise LedgerConflict(f"the run '{key}' is committed: nothing more happens under it")
        return chain


def _bind(connection: sa.Connection, chain: Chain, digests: list[str]) -> None:
    """Note that the files with these digests, some hundreds at most, belong to the chain's data
    set. Raises `InputError` for a file of another data set: no second budget pays for its
    records."""
    query = sa.select(entries.c.key, entries.c.dataset).where(
        entries.c.kind == "data", entries.c.key.in_(digests)
    )
    owners = {row.key: row.dataset for row in connection.execute(query)}
    for digest in digests:
        if digest not in owners:
            chain.append("data", digest, {}, at=now())
        elif owners[digest] != chain.dataset:
            raise InputError(
                f"privacy.dataset: the ledger knows this data, or a file of it, as "
                f"'{owners[digest]}': it has one budget, whatever name a run gives it"
            )


def _refuse_published(connection: sa.Connection, key: str, units: list[str]) -> None:
    for unit in queries.find_units(connection, "publish", key, units):
        raise AlreadyPublished(f"batch '{unit}' is published already")


def _refuse_failed(connection: sa.Connection, key: str, units: list[str]) -> None:
    for unit in queries.find_units(connection, "fail", key, units):
        raise LedgerConflict(f"batch '{unit}' has failed: it is never repeated")


def _chunks(units: Iterable[str]) -> Iterator[list[str]]:
    remaining = iter(units)
    while chunk := list(itertools.islice(remaining, CHUNK)):
        yield chunk


def _check(what: str, text: str, pattern: re.Pattern[str]) -> None:
    # The text is not repeated: what breaks the rule may be what the rule keeps out.
    if not pattern.fullmatch(text):
        raise InputError(f"{what} has to match {pattern.pattern}")


def _check_public(what: str, texts: Iterable[str]) -> None:
    if not all(0 < len(text) <= 200 and text.isprintable() for text in texts):
        raise InputError(f"the name of a {what} has 1 to 200 printable characters")


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values as reading the ledger gives them."""
    plain: dict[str, Any] = json.loads(canonical_json(values))
    return plain
