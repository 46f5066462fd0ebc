"""The ledger durably records what every data set has spent, and which batches were started and
published: one operation is one transaction (`protocol` has the order that the guarantee needs)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Concatenate, Self

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from dpray.ledger import queries
from dpray.ledger.account import RELATIVE_CHANGE, Account, charge_of, check_price, raised_to
from dpray.ledger.chain import Chain, Entry
from dpray.ledger.operations import Operation, Seen, Tip, Transaction
from dpray.ledger.protocol import P, RunLedger, T
from dpray.ledger.store import Store, is_transient
from dpray.types import BudgetRefused, DprayError, LedgerError

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
        [answer] = self.write_together([operation])
        if isinstance(answer, DprayError):
            raise answer
        return answer

    def write_together(self, operations: Sequence[Operation]) -> list[Any]:
        """Carry out operations, which passed their `check`, in one transaction, durably before this
        returns. Each has its own answer, or the `DprayError` that refused it alone; an error of the
        database refuses all.
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
                except BudgetRefused as error:
                    error.ledger = str(self)
                    answers.append(error)
                except DprayError as error:
                    answers.append(error)
            written.write_ends()
        written.remember()
        return answers

    # Reading

    def read(
        self,
        query: Callable[Concatenate[sa.Connection, P], T],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> T:
        with self._store.read() as connection:
            return query(connection, *arguments, **options)

    def holds(self, dataset: str, sequence: int, head: str) -> bool:
        """Return whether an entry with this hash has this place in the data set's chain. Another
        ledger holds no such entry, nor does one that was restored to an earlier state."""
        entry = self.read(queries.entry_at, dataset, sequence)
        return entry is not None and entry.hash == entry.digest() == head

    def verify(self) -> list[str]:
        """Recompute every hash, every cost from its event, and every total, and look whether the
        ledger still has its key. Returns the problems, one line each."""
        return self.read(lambda connection: list(_problems(connection)))

    def show(self) -> dict[str, Any]:
        """Return `ledger` (the URL, without its password) and `datasets`, a list.

        Each data set has `dataset`, `budget`, `privacy_unit`, `neighboring_relation`,
        `composition`, `order`, `spent`, `left`, `created_with` (the first budget), `raises` (each
        with the `budget` after it and its `reason`) and `entries`: one for each charge, with the
        (epsilon, delta) asked for, the epsilon `spent` after it, and the numbers of its batches
        that were started, published and failed.
        """
        with self._store.read() as connection:
            names = queries.dataset_names(connection)
            datasets = [_summary(connection, name) for name in names]
        return {"ledger": str(self), "datasets": datasets}

    def export(self) -> Iterator[dict[str, Any]]:
        """Yield every entry, data set by data set, in the order of its chain."""
        with self._store.read() as connection:
            yield from (entry.to_json() for entry in queries.all_entries(connection))


def _problems(connection: sa.Connection) -> Iterator[str]:
    ends = {row["name"]: row for row in connection.execute(sa.select(queries.datasets)).mappings()}
    for name, rows in groupby(queries.all_entries(connection), key=lambda entry: entry.dataset):
        end = ends.pop(name, None)
        chain = Chain(name)
        yield from _dataset_problems(chain, rows)
        if end is None:
            yield f"data set '{name}': its own row is missing"
        elif end != chain.end | {"name": name}:
            yield (
                f"data set '{name}': its chain has {chain.length} entries of {end['length']}, "
                f"{chain.reservations} reservations of {end['reservations']}, or ends in another "
                "entry than was written"
            )
    for name in ends:
        yield f"data set '{name}': all of its entries are missing"
    try:
        queries.data_key(connection)
    except LedgerError as error:
        yield str(error)


def _dataset_problems(chain: Chain, rows: Iterator[Entry]) -> Iterator[str]:
    """Walk one chain; memory grows with the runs, not with their batches."""
    counted: list[Entry] = []
    open_runs: set[str] = set()
    for entry in rows:
        yield from chain.faults(entry)
        if entry.kind in ("create", "reserve", "raise"):
            counted.append(entry)
        elif entry.kind != "data" and entry.key not in open_runs:
            yield (
                f"data set '{chain.dataset}', entry {entry.seq}: '{entry.kind}' without an open "
                "reservation"
            )
        if entry.kind == "reserve":
            open_runs.add(entry.key)
        elif entry.kind == "commit":
            open_runs.discard(entry.key)
    try:
        Account.replay(counted)
    except (DprayError, ValueError, KeyError, TypeError, AttributeError) as error:
        yield f"data set '{chain.dataset}': its charges cannot be read ({type(error).__name__})"
        return
    yield from _budget_problems(counted)


def _budget_problems(counted: Sequence[Entry]) -> Iterator[str]:
    """Go through a data set's charges and raises: each charge fits the budget of its time."""
    account = Account.replay(counted[:1])
    for entry in counted[1:]:
        rule = account.composition
        if entry.kind == "reserve":
            yield from _charge_problems(account, entry)
            account = replace(account, total=rule.add(account.total, charge_of(entry.payload)))
            if rule.is_exceeded(account.total):
                yield f"data set '{account.dataset}': spent {account.spent} of {account.budget}"
            continue
        try:
            account.check_raise(raised_to(entry))
        except DprayError as error:
            yield f"data set '{account.dataset}', entry {entry.seq}: {error}"
        account = replace(account, composition=replace(rule, budget=raised_to(entry)))


def _charge_problems(account: Account, entry: Entry) -> Iterator[str]:
    place = f"data set '{account.dataset}', reservation '{entry.key}'"
    values = entry.values()
    for term in ("privacy_unit", "neighboring_relation"):
        if values.get(term) != getattr(account, term):
            yield f"{place}: its {term} is not the budget's"
    try:
        charge = charge_of(entry.payload)
        check_price(charge.event, charge.reserved, RELATIVE_CHANGE)
    except (DprayError, ValueError) as error:
        yield f"{place}: {error}"


def _summary(connection: sa.Connection, name: str) -> dict[str, Any]:
    account = queries.read_account(connection, name)
    counted = queries.counted_entries(connection, name)
    runs = [entry for entry in counted if entry.kind == "reserve"]
    return {
        "dataset": name,
        **account.terms(),
        "spent": vars(account.spent),
        "left": vars(account.left),
        "created_with": counted[0].values()["budget"],
        "raises": [{"at": entry.at, **entry.values()} for entry in account.raises],
        "entries": [
            {
                "key": entry.key,
                "at": entry.at,
                **vars(charge_of(entry.payload).reserved),
                "spent": spent.epsilon,
                "event": entry.values()["event"],
                "batches": queries.count(connection, entry.key),
            }
            for entry, spent in zip(runs, account.history(), strict=True)
        ],
    }
