"""The durable ledger: what every data set has spent, and which batches were started and published.

The order that makes a guarantee hold: `reserve` (durable), `begin` a batch (durable), only then
touch the private data, then `publish` the batch's one release. A reservation is spent from the
moment it is written, whatever becomes of the run. Every operation may be repeated: the same key
with the same content gives the same answer, with other content it raises `LedgerConflict`.

One reservation pays for a run's whole partition; a batch is one row, and the work of a `reserve` or
a `publish` does not grow with them (beyond the index's logarithm).
"""

from __future__ import annotations

import datetime
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import sqlalchemy as sa

from dpray.accounting import ledger_audit
from dpray.accounting.composition import Charge
from dpray.accounting.events import Event
from dpray.accounting.hash_chain import Chain, Entry, canonical_json
from dpray.accounting.ledger_account import Account, Reservation, check_price, read_account
from dpray.accounting.ledger_batches import PAGE, BatchListings, Listing, Place, count, read_page
from dpray.accounting.ledger_store import LedgerError, Store, broken_chain, datasets, entries
from dpray.types import Budget, InputError

CHUNK = 500
"""Rows looked up in one statement."""

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@=+-]{0,199}")
_CLASS_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,99}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class LedgerConflict(LedgerError):
    """The key is there already, for something else."""


class AlreadyPublished(LedgerConflict):
    """Another attempt has published this batch: a charge pays for one release of each."""


class Ledger(BatchListings):
    """The ledger at a URL, `sqlite:///path` or `postgresql://...`.

    Every method raises `LedgerError` where the database fails (full disk, lost connection, locked
    for too long): the operation may or may not have happened, and repeating it is safe.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    @classmethod
    def open(cls, url: str) -> Ledger:
        """An existing ledger; a missing one is an `InputError`, never made anew."""
        return cls(Store(url, create=False))

    @classmethod
    def create_or_open(cls, url: str) -> Ledger:
        """The ledger at `url`, made if it is not there."""
        return cls(Store(url, create=True))

    def __str__(self) -> str:
        """The URL, without its password."""
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

        `composition` says how the runs' costs add up (see `accountant`): "basic", or "renyi" at the
        Renyi `order`. Raises `InputError`, and `LedgerConflict` for a data set that has another
        budget.
        """
        account = Account.new(name, budget, privacy_unit, neighboring_relation, composition, order)
        for what, text in (("data set", name), ("privacy unit", privacy_unit)):
            _check_public(what, text)
        terms = _plain(account.terms())

        def work(connection: sa.Connection) -> None:
            chain, found = self._chain(connection, name), _find(connection, "create", name)
            if chain is None or found is None:
                connection.execute(sa.insert(datasets).values(name=name, length=0, head=""))
                chain = Chain(name)
                chain.append("create", name, terms, at=_now())
                self._store.append(connection, chain)
            elif found.values() != terms:
                raise LedgerConflict(f"data set '{name}' has another budget in the ledger already")

        self._store.write(work)

    def account(self, dataset: str) -> Account | None:
        """A data set's budget and charges, or None where it has no budget."""
        with self._store.read() as connection:
            return read_account(connection, dataset)

    def reserve(
        self,
        dataset: str,
        key: str,
        event: Event,
        budget_asked: Budget,
        privacy_unit: str,
        neighboring_relation: str,
    ) -> Reservation:
        """Charge a whole run, durably, before it touches the data. It is never given back.

        `budget_asked` is what the run's report will claim; it has to cover the event's own cost at
        that delta. Raises `BudgetRefused` (nothing is charged), `LedgerConflict`, and `InputError`
        for an unknown data set, or a privacy unit or relation other than the budget's.
        """
        charges = {key: (event, budget_asked)}
        [made] = self.reserve_all(dataset, charges, privacy_unit, neighboring_relation)
        return made

    def reserve_all(
        self,
        dataset: str,
        charges: Mapping[str, tuple[Event, Budget]],
        privacy_unit: str,
        neighboring_relation: str,
    ) -> list[Reservation]:
        """`reserve` of several charges by their keys, all or none."""
        requests = {}
        for key, (event, budget_asked) in charges.items():
            _check("a reservation's key", key, _KEY)
            check_price(event, budget_asked)
            requests[key] = _plain(
                {
                    "event": event.to_json(),
                    "epsilon": budget_asked.epsilon,
                    "delta": budget_asked.delta,
                    "privacy_unit": privacy_unit,
                    "neighboring_relation": neighboring_relation,
                }
            )

        def work(connection: sa.Connection) -> list[Entry]:
            chain, entries = self._chain(connection, dataset), []
            for key, request in requests.items():
                if (entry := _find(connection, "reserve", key)) is None:
                    account = read_account(connection, dataset)
                    if chain is None or account is None:
                        raise InputError(f"the ledger has no data set '{dataset}'")
                    account.admit(Charge(*charges[key]), privacy_unit, neighboring_relation)
                    entry = chain.append("reserve", key, request, at=_now())
                    self._store.append(connection, chain)
                elif entry.dataset != dataset or entry.values() != request:
                    raise LedgerConflict(f"the key '{key}' was reserved for another charge")
                entries.append(entry)
            return entries

        return [Reservation.of(entry) for entry in self._store.write(work)]

    def is_reserved(self, key: str) -> bool:
        """Whether this ledger holds the reservation of a run."""
        with self._store.read() as connection:
            return _find(connection, "reserve", key) is not None

    def begin(self, key: str, attempt_id: str, units: Iterable[str]) -> None:
        """Note, durably and before their data is touched, that an attempt starts these batches.

        Raises `LedgerConflict`, and notes none of them, where a batch is published
        (`AlreadyPublished`) or has failed, or where the run is committed.
        """
        units = list(dict.fromkeys(units))
        _check("an attempt's id", attempt_id, _KEY)
        _check_units(units)

        def work(connection: sa.Connection) -> None:
            chain = self._open_run(connection, key)
            for chunk in _chunks(units):
                _refuse_published(connection, key, chunk)
                _refuse_failed(connection, key, chunk)
                known = _find_units(connection, "begin", key, chunk, attempt_id)
                for unit in chunk:
                    if unit not in known:
                        chain.append("begin", key, {}, unit=unit, attempt=attempt_id)
                self._store.append(connection, chain)

        self._store.write(work)

    def publish(self, key: str, unit: str, attempt_id: str, sha256: str) -> bool:
        """Note the one release of a batch: its file may be put in place once this returns.

        True the first time, False where this attempt has published this very file already. Raises
        `AlreadyPublished` for another attempt, `LedgerConflict` for another file, a batch that has
        failed, or a committed run.
        """
        return self.publish_many(key, attempt_id, [(unit, sha256)]) == 1

    def publish_many(self, key: str, attempt_id: str, releases: Iterable[tuple[str, str]]) -> int:
        """`publish` for (unit, sha256) pairs, all or none; the number that was not there before."""
        distinct = set(releases)
        files = dict(sorted(distinct))
        if len(files) < len(distinct):
            raise LedgerConflict("a batch has one release, not two")
        _check("an attempt's id", attempt_id, _KEY)
        _check_units(files)
        for sha256 in files.values():
            _check("a file's SHA-256", sha256, _SHA256)

        def work(connection: sa.Connection) -> int:
            chain = self._open_run(connection, key)
            length = chain.length
            for chunk in _chunks(files):
                known = _find_units(connection, "publish", key, chunk)
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
        """Note that a batch's own code raised: it is never repeated. Only the class's name is kept.

        True the first time; the first failure of a batch stands, and later ones answer False.
        Raises `AlreadyPublished`, and `LedgerConflict` for a committed run.
        """
        _check("an attempt's id", attempt_id, _KEY)
        _check("the name of an error's class", reason_class_name, _CLASS_NAME)
        _check_units([unit])

        def work(connection: sa.Connection) -> bool:
            chain = self._open_run(connection, key)
            if _find_units(connection, "fail", key, [unit]):
                return False
            _refuse_published(connection, key, [unit])
            failure = {"attempt": attempt_id, "reason": reason_class_name}
            chain.append("fail", key, failure, unit=unit)
            self._store.append(connection, chain)
            return True

        return self._store.write(work)

    def commit(self, key: str) -> bool:
        """Close a run: nothing begins or is published under it any more. True the first time."""

        def work(connection: sa.Connection) -> bool:
            chain = self._run(connection, key)
            if _find(connection, "commit", key):
                return False
            chain.append("commit", key, {}, at=_now())
            self._store.append(connection, chain)
            return True

        return self._store.write(work)

    def page(self, listing: Listing, key: str, after: Place, limit: int = PAGE) -> list[Entry]:
        with self._store.read() as connection:
            return read_page(connection, listing, key, after, limit)

    def counts(self, key: str) -> dict[str, int]:
        """`started` and `published` and `failed` units, `starts` in all, `committed` 0 or 1."""
        with self._store.read() as connection:
            return count(connection, key)

    def verify(self) -> list[str]:
        """Recompute every hash, every cost from its event, and every total: what does not fit, one
        line each, and nothing where all is well."""
        with self._store.read() as connection:
            return list(ledger_audit.problems(connection))

    def show(self) -> dict[str, Any]:
        """`ledger` (the URL, without its password) and `datasets`, a list: see `ledger_audit`."""
        with self._store.read() as connection:
            return {"ledger": str(self), "datasets": ledger_audit.summaries(connection)}

    def export(self) -> Iterator[dict[str, Any]]:
        """Every entry, data set by data set, in the order of its chain."""
        with self._store.read() as connection:
            yield from (entry.to_json() for entry in ledger_audit.all_entries(connection))

    def _chain(self, connection: sa.Connection, dataset: str) -> Chain | None:
        """Lock a data set that is whole; None where nothing of it is there."""
        chain = self._store.chain(connection, dataset)
        created = _find(connection, "create", dataset)
        if chain is None and created is not None:
            # Somebody else may have made it between the two looks.
            chain = self._store.chain(connection, dataset)
        if (chain is None) != (created is None):
            raise broken_chain(dataset)
        return chain

    def _run(self, connection: sa.Connection, key: str) -> Chain:
        """Lock the data set that a reservation was made on."""
        reservation = _find(connection, "reserve", key)
        if reservation is None:
            raise LedgerConflict(f"the ledger has no reservation '{key}'")
        chain = self._store.chain(connection, reservation.dataset)
        if chain is None:
            raise broken_chain(reservation.dataset)
        return chain

    def _open_run(self, connection: sa.Connection, key: str) -> Chain:
        chain = self._run(connection, key)
        if _find(connection, "commit", key):
            raise LedgerConflict(f"the run '{key}' is committed: nothing more happens under it")
        return chain


def _find(connection: sa.Connection, kind: str, key: str) -> Entry | None:
    query = sa.select(entries).where(entries.c.kind == kind, entries.c.key == key)
    row = connection.execute(query).first()
    return None if row is None else Entry(**row._mapping)


def _find_units(
    connection: sa.Connection, kind: str, key: str, units: list[str], attempt: str = ""
) -> dict[str, dict[str, Any]]:
    """The payloads of those units that have an entry of this kind."""
    query = sa.select(entries.c.unit, entries.c.payload).where(
        entries.c.kind == kind,
        entries.c.key == key,
        entries.c.unit.in_(units),
        entries.c.attempt == attempt,
    )
    return {unit: json.loads(payload) for unit, payload in connection.execute(query)}


def _refuse_published(connection: sa.Connection, key: str, units: list[str]) -> None:
    for unit in _find_units(connection, "publish", key, units):
        raise AlreadyPublished(f"batch '{unit}' is published already")


def _refuse_failed(connection: sa.Connection, key: str, units: list[str]) -> None:
    for unit in _find_units(connection, "fail", key, units):
        raise LedgerConflict(f"batch '{unit}' has failed: its own code raised, it is not repeated")


def _chunks(units: Iterable[str]) -> Iterator[list[str]]:
    remaining = iter(units)
    while chunk := list(itertools.islice(remaining, CHUNK)):
        yield chunk


def _check(what: str, text: str, pattern: re.Pattern[str]) -> None:
    # The text is not repeated: what breaks the rule may be what the rule keeps out.
    if not pattern.fullmatch(text):
        raise InputError(f"{what} has to match {pattern.pattern}")


def _check_public(what: str, text: str) -> None:
    if not (0 < len(text) <= 200 and text.isprintable()):
        raise InputError(f"the name of a {what} has 1 to 200 printable characters")


def _check_units(units: Iterable[str]) -> None:
    for unit in units:
        _check_public("batch", unit)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """The values as they come back out of the ledger."""
    plain: dict[str, Any] = json.loads(canonical_json(values))
    return plain


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
