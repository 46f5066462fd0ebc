"""The ledger durably records what every data set has spent, and which batches were started and
published: one operation is one transaction (`protocol` has the order that the guarantee needs)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from dpray.accounting.composition import Charge
from dpray.ledger import transaction
from dpray.ledger.account import Account, admit, charge_of
from dpray.ledger.chain import Entry
from dpray.ledger.errors import LedgerConflict
from dpray.ledger.operations import CreateDataset, CreateTenant, Operation
from dpray.ledger.protocol import PAGE, Listing, Place, RunLedger
from dpray.ledger.show import count, problems, summaries
from dpray.ledger.store import Store, entries, is_transient
from dpray.ledger.transaction import Seen, Tip, Transaction
from dpray.types import Budget, DprayError

ATTEMPTS = 8
"""A write is made this often at most, over some ten seconds, if its connection is lost."""

Heads = dict[str, tuple[int, str]]
"""The length and the last hash of each data set's chain."""


class Ledger(RunLedger):
    """The budgets at a URL, `sqlite:///path` or `postgresql://...`.

    An operation whose connection was lost, in the middle of a commit too, is repeated: it is
    idempotent by its key, so it finds its entries or writes them. Then `publish`, `fail` and
    `commit` may answer as they do the second time. Threads may share a ledger.
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

    def create_dataset(
        self,
        name: str,
        budget: Budget,
        privacy_unit: str,
        neighboring_relation: str,
        composition: str = "basic",
        order: float | None = None,
        parent: str | None = None,
    ) -> None:
        """Give a data set its budget, once and for all.

        A name that differs in case or blanks alone means the same data set. `composition` is how
        the runs' costs add up: "basic", or "renyi" at the Rényi `order`. `parent` is a data set
        that holds the same privacy units (this one is a subset of it, or made from it unit by
        unit), with the same unit and relation. Raises `InputError`, also for a data set that has
        another budget or parent.
        """
        stated_for = privacy_unit, neighboring_relation
        self.write(CreateDataset(name, budget, *stated_for, composition, order, parent))

    def create_tenant(self, dataset: str, tenant: str, budget: Budget) -> None:
        """Give a tenant its cap on a data set, once and for all: its runs' costs add up to no more,
        by the data set's own rule, and stay within the data set's budget besides. From then on
        every run on the data set, and on its children, has to name one of its tenants.

        Raises `InputError`, also for a cap beyond the data set's budget, and for a tenant that has
        another cap or another's name in other letters.
        """
        self.write(CreateTenant(dataset, tenant, budget))

    def write(self, operation: Operation) -> Any:
        """Carry out one operation in a transaction of its own, and return its answer."""
        try:
            [answer] = self.write_together([operation])
        finally:
            self.release_connection()
        if isinstance(answer, DprayError):
            raise answer
        return answer

    def write_together(self, operations: Sequence[Operation]) -> list[Any]:
        """Carry out operations in one transaction, durably before this returns. Each has its own
        answer, or the `DprayError` that refused it alone.

        If the database refuses the transaction for a reason that may pass, each operation is made
        again in a transaction of its own. Call `release_connection` when no more are waiting.
        """
        refused = [_refusal(operation) for operation in operations]
        valid = [op for op, error in zip(operations, refused, strict=True) if error is None]
        with self._one_writer:
            answers = iter(self._transact_or_retry(valid) if valid else [])
        return [next(answers) if error is None else error for error in refused]

    def release_connection(self) -> None:
        """Leave the file of an SQLite ledger whole; see `Store.release_connection`."""
        with self._one_writer:
            self._store.release_connection()

    def chain_heads(self) -> Heads:
        """Return the ends of the chains that this ledger has seen when it wrote. From then on it
        writes to no data set that does not hold what was seen."""
        return {name: (tip.length, tip.head) for name, tip in dict(self._seen.tips).items()}

    def require_heads(self, heads: Heads) -> None:
        """Write to no data set that does not hold these ends, which another process saw."""
        with self._one_writer:
            for name, (length, head) in heads.items():
                tip = self._seen.tips.get(name)
                if tip is None or tip.length < length:
                    self._seen.tips[name] = Tip(length, head, None)

    def _transact_or_retry(self, operations: Sequence[Operation]) -> list[Any]:
        try:
            return self._transact(operations)
        except DprayError as error:  # no transaction begins
            return [error] * len(operations)
        except SQLAlchemyError as error:
            self._seen.forget_uncommitted()
            if not is_transient(error):
                return [self._failure(error)] * len(operations)
        return [self._transact_alone(operation) for operation in operations]

    def _transact_alone(self, operation: Operation) -> Any:
        try:
            for attempt in Retrying(
                retry=retry_if_exception(is_transient),
                stop=stop_after_attempt(ATTEMPTS),
                wait=wait_exponential(multiplier=0.1, max=5),
                reraise=True,
            ):
                with attempt:
                    [answer] = self._transact([operation])
            return answer
        except DprayError as error:
            return error
        except SQLAlchemyError as error:
            return self._failure(error)

    def _failure(self, error: SQLAlchemyError) -> DprayError:
        failure = self._store.error(error)
        failure.__cause__ = error
        return failure

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

    def account(self, dataset: str) -> Account | None:
        with self._store.read() as connection:
            name = transaction.stored_name(connection, dataset)
            return None if name is None else transaction.read_account(connection, name)

    def check(
        self, dataset: str, charge: Charge, privacy_unit: str, neighboring_relation: str
    ) -> None:
        """Raise as `reserve` would for this charge now, and make none."""
        with self._store.read() as connection:
            names = transaction.lineage(connection, dataset)
            accounts = [transaction.read_account(connection, name) for name in names]
        admit(accounts, charge, privacy_unit, neighboring_relation)

    def committed(self, dataset: str) -> Budget:
        """Return what the finished runs of a data set, by its name in the ledger, and of its
        children add up to. A run's later charges have its key before a slash."""
        with self._store.read() as connection:
            counted = transaction.counted_entries(connection, dataset)
            runs = {entry.key: entry.key.split("/")[0] for entry in counted}
            closed = transaction.find_all(connection, "commit", set(runs.values()))
        rule = Account.replay(counted).composition
        own = (entry for entry in counted if entry.kind == "reserve" and runs[entry.key] in closed)
        return rule.spent(rule.total(charge_of(entry.payload) for entry in own))

    def names(self) -> list[str]:
        """Return the names of the data sets that the ledger has."""
        with self._store.read() as connection:
            return transaction.dataset_names(connection)

    def is_reserved(self, key: str) -> bool:
        """Return whether this ledger holds the charge with this key."""
        with self._store.read() as connection:
            return transaction.find(connection, "reserve", key) is not None

    def last_commit(self, key: str) -> Entry:
        with self._store.read() as connection:
            entry = transaction.find(connection, "commit", key)
        if entry is None:
            raise LedgerConflict("the run is not committed")
        return entry

    def holds(self, dataset: str, sequence: int, head: str) -> bool:
        """Return whether an entry with this hash has this place in the data set's chain. Another
        ledger holds no such entry, nor does one that was restored to an earlier state."""
        with self._store.read() as connection:
            place = (entries.c.dataset == dataset, entries.c.seq == sequence)
            entry = transaction.first(connection, sa.select(entries).where(*place))
        return entry is not None and entry.hash == entry.digest() == head

    def page(self, listing: Listing, key: str, after: Place, limit: int = PAGE) -> list[Entry]:
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
            other = entries.alias()
            has_outcome = sa.exists().where(
                other.c.kind.in_(("publish", "fail")),
                other.c.key == entries.c.key,
                other.c.unit == entries.c.unit,
            )
            query = query.where(~has_outcome)
        with self._store.read() as connection:
            return [Entry(**row._mapping) for row in connection.execute(query)]

    def counts(self, key: str) -> dict[str, int]:
        with self._store.read() as connection:
            return count(connection, key)

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
            yield from (entry.to_json() for entry in transaction.all_entries(connection))


def _refusal(operation: Operation) -> DprayError | None:
    try:
        operation.check()
    except DprayError as error:
        return error
    return None
