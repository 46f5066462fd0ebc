"""Writes to the ledger that wait at the same time are made in one transaction.

What a write takes is mostly the waiting for the disk, and, in PostgreSQL, for the network. The
first of the threads that want to write does it for all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from sqlalchemy.exc import SQLAlchemyError
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from dpray.ledger.store import LedgerError, Store, is_passing
from dpray.ledger.transaction import Seen, Tip, Transaction
from dpray.types import DprayError

T = TypeVar("T")

ATTEMPTS = 8
"""A write is made again so often, over some ten seconds, if its connection was lost."""


class _Call:
    def __init__(self, needs: Callable[[Transaction], Iterable[str]], work: Callable[..., Any]):
        self.needs, self.work = needs, work
        self.answer: Any = None
        self.error: BaseException | None = None
        self.is_done = False


class Writer:
    """Makes the writes of all threads that share a ledger, durably before any of them returns.

    Every operation is idempotent by its key. So where a connection was lost, in the middle of a
    commit too, nobody has to know whether the commit happened: the operation is made again, and
    finds its entries or writes them.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen = Seen()
        self._waiting: list[_Call] = []
        self._is_writing = False
        self._changed = threading.Condition()

    def write(
        self, needs: Callable[[Transaction], Iterable[str]], work: Callable[[Transaction], T]
    ) -> T:
        """Return what `work` answers in a transaction that has locked the data sets that it
        `needs`, once that is on disk. Raises its `DprayError`, with nothing written, and
        `LedgerError` if the database fails."""
        call = _Call(needs, work)
        with self._changed:
            self._waiting.append(call)
            self._changed.wait_for(lambda: call.is_done or not self._is_writing)
            calls: list[_Call] = []
            if not call.is_done:
                calls, self._waiting, self._is_writing = self._waiting, [], True
        if calls:
            try:
                self._write_all(calls)
            finally:
                try:
                    if not self._waiting:
                        self._store.rest()
                finally:
                    with self._changed:
                        for each in calls:
                            each.is_done = True
                        self._is_writing = False
                        self._changed.notify_all()
        if call.error is not None:
            raise call.error
        answer: T = call.answer
        return answer

    def ends(self) -> dict[str, tuple[int, str]]:
        """Return the length and the last hash of each chain as this process last saw it."""
        return {name: (tip.length, tip.head) for name, tip in dict(self._seen.tips).items()}

    def expect(self, ends: Mapping[str, tuple[int, str]]) -> None:
        """Take what another process saw for seen here."""
        for name, (length, head) in ends.items():
            tip = self._seen.tips.get(name)
            if tip is None or tip.length < length:
                self._seen.tips[name] = Tip(length, head, None)

    def _write_all(self, calls: list[_Call]) -> None:
        for call in calls:
            call.error = LedgerError("the process that wrote to the ledger was interrupted")
        try:
            self._transact(calls)
        except DprayError as error:  # no transaction begins
            for call in calls:
                call.error = error
        except SQLAlchemyError as error:
            alone = is_passing(error)
            for call in calls:
                self._write_alone(call) if alone else self._fail(call, error)

    def _write_alone(self, call: _Call) -> None:
        """Make one write, again and again: what hindered it with the others may be over."""
        try:
            for attempt in Retrying(
                retry=retry_if_exception(is_passing),
                stop=stop_after_attempt(ATTEMPTS),
                wait=wait_exponential(multiplier=0.1, max=5),
                reraise=True,
            ):
                with attempt:
                    self._transact([call])
        except SQLAlchemyError as error:
            self._fail(call, error)

    def _fail(self, call: _Call, error: SQLAlchemyError) -> None:
        call.error = self._store.error(error)
        call.error.__cause__ = error

    def _transact(self, calls: list[_Call]) -> None:
        """Carry out the calls in one transaction; each gets its answer or its own refusal."""
        outcomes: list[tuple[Any, DprayError | None]] = []
        with self._store.begin() as connection:
            transaction = Transaction(connection, self._seen)
            refused: dict[_Call, DprayError] = {}
            needed: set[str] = set()
            for call in calls:
                try:
                    needed.update(call.needs(transaction))
                except DprayError as error:
                    refused[call] = error
            transaction.lock(needed)
            for call in calls:
                if call in refused:
                    outcomes.append((None, refused[call]))
                    continue
                try:
                    outcomes.append((call.work(transaction), None))
                except DprayError as error:
                    outcomes.append((None, error))
            transaction.write_ends()
        transaction.remember()
        for call, outcome in zip(calls, outcomes, strict=True):
            call.answer, call.error = outcome
