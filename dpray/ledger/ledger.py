"""The ledger durably records what every data set has spent, and which batches were started and
published: one operation is one transaction (`protocol` has the order that the guarantee needs)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, Self

from sqlalchemy.exc import SQLAlchemyError
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from dpray.ledger import queries
from dpray.ledger.account import Account, charge_of
from dpray.ledger.chain import Entry
from dpray.ledger.operations import Operation, Seen, Tip, Transaction
from dpray.ledger.protocol import Kind, Place, RunLedger, in_pages
from dpray.ledger.show import problems, summaries
from dpray.ledger.store import Store, is_transient
from dpray.types import Budget, DprayError

ATTEMPTS = 8
"""A write is made this often at most, over some ten seconds, if its connection is lost."""

Heads = dict[str, tuple[int, str]]
"""The length and the last hash of each data set's chain."""


class Ledger(RunLedger):
    """The budgets at a URL, `sqlite:///path` or `postgresql://...`.

    A transaction whose connection was lost, in the middle of a commit too, is repeated: operations
    are idempotent by their key, so each finds its entries or writes them. Then `publish`, `fail`
    and `commit` may answer as they do the second time. Threads may share a ledger.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen = Seen()
        self._one_writer = threading.Lock()

    @classmethod
    def open(cls, url: str) -> Self:
        """Open a ledger that is there. Raises `MissingLedger` if it is not; none is made."""
        return cls(Store(url, create=False))

    @classmethod
    def create_or_open(cls, url: str) -> Self:
        """Open the ledger at `url`, and make it if it is not there."""
        return cls(Store(url, create=True))

    def __str__(self) -> str:
        """Return the URL, without its password."""
        return str(self._store)

    def close(self) -> None:
        self._store.close()

    # Writing

    def write(self, operation: Operation) -> Any:
        """Carry out one operation in a transaction of its own, and return its answer."""
        operation.check()
        try:
            [answer] = self.write_together([operation])
        finally:
            self.release_connection()
        if isinstance(answer, DprayError):
            raise answer
        return answer

    def write_together(self, operations: Sequence[Operation]) -> list[Any]:
        """Carry out operations, which passed their `check`, in one transaction, durably before this
        returns. Each has its own answer, or the `DprayError` that refused it alone; an error of the
        database refuses all. Call `release_connection` when no more are waiting.
        """
        repeat = Retrying(
            retry=retry_if_exception(is_transient),
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_exponential(multiplier=0.1, max=5),
            reraise=True,
        )
        try:
            with self._one_writer:
                return repeat(self._transact, operations)
        except DprayError as error:  # no transaction begins
            return [error] * len(operations)
        except SQLAlchemyError as error:
            failure = self._store.error(error)
            failure.__cause__ = error
            return [failure] * len(operations)

    def release_connection(self) -> None:
        """Leave the file of an SQLite ledger whole; see `Store.release_connection`."""
        with self._one_writer:
            self._store.release_connection()

    def chain_heads(self) -> Heads:
        """Return the ends of the chains that this ledger has seen when it wrote. From then on it
        writes to no data set that does not hold them."""
        return {name: (tip.length, tip.head) for name, tip in dict(self._seen.tips).items()}

    def require_heads(self, heads: Heads) -> None:
        """Write to no data set that does not hold these ends, which another process saw."""
        with self._one_writer:
            tips = self._seen.tips
            for name, (length, head) in heads.items():
                if name not in tips or tips[name].length < length:
                    tips[name] = Tip(length, head)

    def _transact(self, operations: Sequence[Operation]) -> list[Any]:
        answers: list[Any] = []
        with self._store.begin() as connection:
            written = Transaction(connection, self._seen)
            for operation in operations:
                try:
                    answers.append(operation.apply(written))
                except DprayError as error:
                    answers.append(error)
            written.write_ends()
        written.remember()
        return answers

    # Reading

    def find(self, kind: str, key: str) -> Entry | None:
        with self._store.read() as connection:
            return queries.find(connection, kind, key)

    def entries(self, kind: Kind, key: str) -> Iterator[Entry]:
        return in_pages(self.page, kind, key)

    def page(self, kind: Kind, key: str, after: Place) -> list[Entry]:
        """Return the next of `entries`, those after a place; ("", "") is the beginning."""
        with self._store.read() as connection:
            return queries.page(connection, kind, key, after)

    def account(self, dataset: str) -> Account | None:
        with self._store.read() as connection:
            name = queries.stored_name(connection, dataset)
            return None if name is None else queries.read_account(connection, name)

    def names(self) -> list[str]:
        with self._store.read() as connection:
            return queries.dataset_names(connection)

    def count(self, key: str, prefix: str) -> dict[str, int]:
        with self._store.read() as connection:
            return queries.count(connection, key, prefix)

    def committed(self, dataset: str) -> Budget:
        """Return the sum of the finished runs of a data set, by its name in the ledger, and of its
        children. A run's later charges have its key before a slash."""
        with self._store.read() as connection:
            counted = queries.counted_entries(connection, dataset)
            runs = {entry.key: entry.key.split("/")[0] for entry in counted}
            closed = queries.find_all(connection, "commit", set(runs.values()))
        rule = Account.replay(counted).composition
        own = (entry for entry in counted if entry.kind == "reserve" and runs[entry.key] in closed)
        return rule.spent(rule.total(charge_of(entry.payload) for entry in own))

    def holds(self, dataset: str, sequence: int, head: str) -> bool:
        """Return whether an entry with this hash has this place in the data set's chain. Another
        ledger holds no such entry, nor does one that was restored to an earlier state."""
        with self._store.read() as connection:
            entry = queries.entry_at(connection, dataset, sequence)
        return entry is not None and entry.hash == entry.digest() == head

    def verify(self) -> list[str]:
        """Recompute every hash, every cost from its event, and every total. Returns the problems,
        one line each."""
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
