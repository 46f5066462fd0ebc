"""The ledger durably records what every data set has spent, and which batches were started and
published. One operation is one transaction.

The guarantee rests on this order: `reserve` (durable), `begin` a unit (durable), only then touch
the private data, then `publish` the unit's one release. A reservation is spent once it is written,
also if the run fails. Every operation may be repeated: the same key with the same content gives the
same answer, with other content it raises `LedgerConflict`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, Self, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from dpray.accounting.event import Event, accountant_version
from dpray.ledger import queries
from dpray.ledger.account import (
    RELATIVE_CHANGE,
    RELATIVE_ROUNDING,
    Account,
    charge_of,
    check_price,
    new_account,
    raised_to,
)
from dpray.ledger.chain import CLASS_NAME, KEY_PATTERN, SHA256, Chain, Entry, check, check_public
from dpray.ledger.store import Store, is_transient
from dpray.ledger.transaction import Seen, Tip, Transaction
from dpray.types import Budget, BudgetRefused, DprayError, Json, LedgerConflict, LedgerError

Start = tuple[str, str]
"""A unit and the attempt that started it."""

P = ParamSpec("P")
T = TypeVar("T")


class Write(NamedTuple):
    """A method of `Transaction` with its arguments, for a transaction that it may share."""

    operation: Callable[..., object]
    arguments: Sequence[object]
    options: Mapping[str, object]


class RunLedger(ABC):
    """The operations and questions of a run. An implementation has `write`, `read` and `close`.

    Every method raises `LedgerError` if the database fails (full disk, lost connection, locked for
    too long): the operation may or may not have happened, and repeating it is safe.
    """

    @abstractmethod
    def write(
        self,
        operation: Callable[Concatenate[Transaction, P], T],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> T:
        """Carry out one method of `Transaction`, durably, and return its answer."""

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

        A name that differs only in case or blanks means the same data set. `composition` is the
        rule by which the runs' costs add up: "basic", or "renyi" at the Rényi `order`. Raises
        `InputError`, also for a data set that has another budget.
        """
        stated_for = privacy_unit, neighboring_relation
        new = new_account(name, budget, *stated_for, composition, order)
        self.write(Transaction.create_dataset, new)

    def raise_budget(
        self, dataset: str, reason: str, *, epsilon: float | None = None, delta: float | None = None
    ) -> Account:
        """Make the budget of a data set larger, on record, and return its account. A part that is
        not given stays as it is; so does the rule of composition, with its order.

        From then on everything that was ever released from the data set has the guarantee of the
        new budget, and no stronger one. Raises `InputError` for an unknown data set, and for a
        budget that is not larger. The same raise twice is one.
        """
        check_public("a reason", [reason.strip()], 1000)
        return self.write(Transaction.raise_budget, dataset, epsilon, delta, reason.strip())

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
        new = None if new_budget is None else new_account(dataset, new_budget, *stated_for)
        for key, (event, asked) in charges.items():
            check("a reservation's key", key, KEY_PATTERN)
            check_price(event, asked)
        return self.write(
            Transaction.reserve, dataset, charges, *stated_for, tuple(files), new, is_trial=is_trial
        )

    def begin(self, charge_key: str, attempt_id: str, units: Iterable[str]) -> None:
        """Record, durably and before their data is touched, that an attempt starts these units.

        Raises `LedgerConflict`, and records none of them, if one is published (`AlreadyPublished`)
        or has failed, or if the run is committed.
        """
        own = tuple(dict.fromkeys(units))
        check("an attempt's id", attempt_id, KEY_PATTERN)
        check_public("the name of a batch", own)
        self.write(Transaction.begin, charge_key, attempt_id, own)

    def publish(self, charge_key: str, attempt_id: str, releases: Iterable[tuple[str, str]]) -> int:
        """Record the one release of each unit, by (unit, SHA-256 of its file), all or none: the
        files may be put in place once this returns.

        Returns the number of new releases: this attempt may publish the very same file again.
        Raises `AlreadyPublished` for another attempt, `LedgerConflict` for another file, a unit
        that has failed, or a committed run.
        """
        own = sorted(set(releases))
        units = [unit for unit, _ in own]
        if len(set(units)) < len(units):
            raise LedgerConflict("a batch has one release, not two")
        check("an attempt's id", attempt_id, KEY_PATTERN)
        check_public("the name of a batch", units)
        for _, sha256 in own:
            check("a file's SHA-256", sha256, SHA256)
        return self.write(Transaction.publish, charge_key, attempt_id, own)

    def fail(self, charge_key: str, unit: str, attempt_id: str, reason_class_name: str) -> bool:
        """Record that a unit failed: it is never repeated. Of the error, only its class's name is
        kept.

        Returns True the first time; the first failure of a unit stands, and later ones answer
        False. Raises `AlreadyPublished`, and `LedgerConflict` for a committed run.
        """
        check("an attempt's id", attempt_id, KEY_PATTERN)
        check("the name of an error's class", reason_class_name, CLASS_NAME)
        check_public("the name of a batch", [unit])
        return self.write(Transaction.fail, charge_key, unit, attempt_id, reason_class_name)

    def commit(self, charge_key: str) -> bool:
        """Close a run: nothing begins or is published under it from now on. Returns True the first
        time."""
        return self.write(Transaction.commit, charge_key)

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
        return self.read(queries.count, charge_key)

    def account(self, dataset: str) -> Account | None:
        """Return a data set's budget and charges, or None if it has no budget."""
        return self.read(queries.find_account, dataset)

    def names(self) -> list[str]:
        """Return the names of the data sets that the ledger has."""
        return self.read(queries.dataset_names)

    def started(self, charge_key: str) -> Iterator[Start]:
        """Yield (unit, attempt) of every start, sorted: one for each attempt at a unit."""
        return ((unit, entry.attempt) for unit, entry in self._units("begin", charge_key))

    def repeated(self, charge_key: str) -> Iterator[str]:
        """Yield the units that were begun more than once; not all names are held at once."""
        for unit, attempts in groupby(self.started(charge_key), key=itemgetter(0)):
            if sum(1 for _ in attempts) > 1:
                yield unit

    def unfinished(self, charge_key: str) -> Iterator[Start]:
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

    def _units(
        self, kind: Literal["begin", "publish", "fail"], charge_key: str
    ) -> Iterator[tuple[str, Entry]]:
        """Yield a run's units with their entries of one kind, in pages: they may be a million."""
        after = ("", "")
        while rows := self.read(queries.page, kind, charge_key, after):
            yield from ((entry.unit, entry) for entry in rows)
            after = (rows[-1].unit, rows[-1].attempt)


class NullLedger(RunLedger):
    """The ledger of a run without noise, which claims nothing and is charged nothing. It keeps
    nothing, so it has no units and no counts."""

    def write(self, operation: Callable[..., T], *arguments: object, **options: object) -> T:
        answers: dict[object, Any] = {Transaction.publish: 0, Transaction.reserve: []}
        answer: T = answers.get(operation, False)
        return answer

    def read(self, query: Callable[..., T], *arguments: object, **options: object) -> T:
        answers: dict[object, Any] = {query: None, queries.count: Counter[str](), queries.page: []}
        answers[queries.dataset_names] = []
        answer: T = answers[query]
        return answer

    def close(self) -> None:
        pass


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

    def write(
        self,
        operation: Callable[Concatenate[Transaction, P], T],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> T:
        [answer] = self.write_together([Write(operation, arguments, options)])
        if isinstance(answer, DprayError):
            raise answer
        found: T = answer
        return found

    def write_together(self, writes: Sequence[Write]) -> list[Any]:
        """Carry out the writes in one transaction, durably before this returns. Each has its own
        answer, or the `DprayError` that refused it alone; an error of the database refuses all.
        """
        repeat = Retrying(
            retry=retry_if_exception(is_transient),
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_exponential(multiplier=0.1, max=5),
            reraise=True,
        )
        try:
            with self._one_writer:
                return repeat(self._transact, writes)
        except DprayError as error:  # no transaction begins
            return [error] * len(writes)
        except SQLAlchemyError as error:
            failure = self._store.error(error)
            failure.__cause__ = error
            return [failure] * len(writes)

    def chain_heads(self) -> Heads:
        """Return the ends of the chains that this ledger has seen when it wrote. From then on it
        writes to no data set that does not hold them."""
        return {name: (tip.length, tip.head) for name, tip in dict(self._seen.tips).items()}

    def require_heads(self, heads: Heads) -> None:
        """Take over the `chain_heads` of another process."""
        with self._one_writer:
            tips = self._seen.tips
            for name, (length, head) in heads.items():
                if name not in tips or tips[name].length < length:
                    tips[name] = Tip(length, head)

    def _transact(self, writes: Sequence[Write]) -> list[Any]:
        answers: list[object] = []
        with self._store.begin() as connection:
            written = Transaction(connection, self._seen)
            for operation, arguments, options in writes:
                try:
                    answers.append(operation(written, *arguments, **options))
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

    def show(self) -> Json:
        """Return `ledger` (the URL, without its password) and `datasets`, a list.

        Each data set has `dataset`, `budget`, `privacy_unit`, `neighboring_relation`,
        `composition`, `order`, `spent`, `left`, `created_with` (the first budget), `raises` (each
        with the `budget` after it and its `reason`) and `entries`: one for each charge, with the
        (epsilon, delta) asked for, the epsilon `spent` after it, and the numbers of its batches
        that were started, published and failed.
        """
        with self._store.read() as connection:
            names = queries.dataset_names(connection)
            datasets = [_account_summary(connection, name) for name in names]
        return {"ledger": str(self), "datasets": datasets}

    def export(self) -> Iterator[dict[str, object]]:
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
        is_same = values.get("accountant") == accountant_version()
        tolerance = RELATIVE_ROUNDING if is_same else RELATIVE_CHANGE
        check_price(charge.event, charge.reserved, tolerance)
    except (DprayError, ValueError) as error:
        yield f"{place}: {error}"


def _account_summary(connection: sa.Connection, name: str) -> dict[str, object]:
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
