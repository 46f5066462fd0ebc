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

A budget may be shared out: each tenant (a team, a project) then has a cap of its own inside it. And
a data set may be the child of another, a subset or a derived table of the same people: whatever is
charged to it is drawn on its parent, and on the parent's parent, in the same transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from dpray.accounting import composition as rules
from dpray.accounting.event import Event
from dpray.ledger import queries
from dpray.ledger.account import Account, admit, check_price, read_lineage
from dpray.ledger.chain import Chain, Entry, now
from dpray.ledger.names import (
    CLASS_NAME,
    KEY,
    SHA256,
    check,
    check_name,
    check_public,
    plain,
)
from dpray.ledger.schema import lock
from dpray.ledger.store import LedgerConflict, Store
from dpray.ledger.transaction import Transaction
from dpray.ledger.view import LedgerView
from dpray.ledger.writer import Writer
from dpray.types import Budget, InputError


class AlreadyPublished(LedgerConflict):
    """Another attempt has published this batch: a charge pays for one release of each."""


class Ledger(LedgerView):
    """Keeps the budgets at a URL, `sqlite:///path` or `postgresql://...`.

    Every method raises `LedgerError` if the database fails (full disk, lost connection, locked for
    too long): the operation may or may not have happened, and repeating it is safe. An operation
    whose connection was lost is repeated by itself; then `publish_many`, `fail` and `commit` may
    answer as they do the second time. Threads may share a ledger: those that write at the same time
    share a transaction.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._writer = Writer(store)

    def ends(self) -> dict[str, tuple[int, str]]:
        """Return the length and the last hash of each data set's chain that this ledger has seen
        when it wrote. From then on it writes to no data set that does not hold what was seen."""
        return self._writer.ends()

    def expect(self, ends: Mapping[str, tuple[int, str]]) -> None:
        """Write to no data set that does not hold these ends, which another process saw."""
        self._writer.expect(ends)

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

        A name that differs in case or blanks alone means the same data set. `composition` says how
        the runs' costs add up: "basic", or "renyi" at the Rényi `order`. `parent` is a data set
        that holds the same privacy units (this one is a subset of it, or made from it unit by
        unit), with the same unit and relation. Raises `InputError`, also for a data set that has
        another budget or parent.
        """
        if composition != rules.RenyiComposition.name and order is not None:
            raise InputError("an order belongs to a budget with the composition renyi")
        try:
            rule = rules.composition(composition, budget, order)
        except ValueError as error:
            raise InputError(f"data set '{name}': {error}") from error
        check_public("privacy unit", [privacy_unit])
        account = Account(name, rule, privacy_unit, neighboring_relation)

        def needs(transaction: Transaction) -> list[str]:
            lock(transaction.connection)
            known = queries.stored_name(transaction.connection, name)
            return [] if known is None else [known]

        def work(transaction: Transaction) -> None:
            transaction.write_ends()  # the queries below read what this writes
            connection = transaction.connection
            known = queries.stored_name(connection, name)
            above = None if parent is None else read_lineage(connection, parent)[0]
            terms = plain(account.below(above).terms())
            if known is None:
                chain = Chain(check_name("data set", name))
                chain.append("create", chain.dataset, terms, at=now())
                transaction.add_dataset(chain)
            elif plain(transaction.account(known).terms()) != terms:
                raise InputError(f"data set '{known}' has another budget in the ledger already")

        self._writer.write(needs, work)

    def create_tenant(self, dataset: str, tenant: str, budget: Budget) -> None:
        """Give a tenant its cap on a data set, once and for all: its runs' costs add up to no more,
        by the data set's own rule, and stay within the data set's budget besides. From then on
        every run on the data set, and on its children, has to name one of its tenants.

        Raises `InputError`, also for a cap beyond the data set's budget, and for a tenant that has
        another cap or another's name in other letters.
        """
        name = check_name("tenant", tenant)

        def work(transaction: Transaction) -> None:
            [own, *_] = transaction.lineage(dataset)
            account = transaction.account(own)
            if name not in account.tenants:
                terms = plain(account.cap(name, budget))
                chain = transaction.chain(own)
                chain.append("create", own, terms, unit=name, at=now())
                transaction.add(chain)
            elif account.tenants[name].budget != budget:
                raise InputError(f"the tenant '{name}' has another budget on '{own}' already")

        self._writer.write(lambda transaction: transaction.lineage(dataset), work)

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

        `charges` holds, by the charge's key, the event and what the run's report will claim for it,
        which has to cover the event's own cost at that delta. `files` are the digests of the data's
        files: the ledger binds each to the first data set that it is charged to. `tenant` is who
        the run is made for. The charge is drawn on every ancestor of the data set too. Raises
        `BudgetRefused` (nothing is charged anywhere), `LedgerConflict`, and `InputError` for an
        unknown data set or tenant, a privacy unit or relation other than the budget's, or a file of
        another data set.
        """
        files = list(dict.fromkeys(files))
        requests = {}
        for key, (event, asked) in charges.items():
            check("a reservation's key", key, KEY)
            check_price(event, asked)
            requests[key] = plain(
                {
                    "event": event.to_json(),
                    "epsilon": asked.epsilon,
                    "delta": asked.delta,
                    "privacy_unit": privacy_unit,
                    "neighboring_relation": neighboring_relation,
                }
                | ({} if tenant is None else {"tenant": tenant})
            )

        def work(transaction: Transaction) -> list[Entry]:
            names = transaction.lineage(dataset)
            accounts = [transaction.account(name) for name in names]
            own, *ancestors = chains = [transaction.chain(name) for name in names]
            made = {}
            for key, request in requests.items():
                if (entry := transaction.reserved(key)) is None:
                    charge = rules.Charge(*charges[key], tenant)
                    accounts = admit(accounts, charge, privacy_unit, neighboring_relation)
                elif entry.dataset != own.dataset or entry.values() != request:
                    raise LedgerConflict(f"the key '{key}' was reserved for another charge")
                else:
                    made[key] = entry
            digests = self._store.digests(transaction.connection, files) if files else []
            unbound = _unbound(transaction, own.dataset, digests)
            # From here on nothing refuses the run.
            at = now()
            for key, request in requests.items():
                if key not in made:
                    made[key] = own.append("reserve", key, request, at=at)
                    for chain in ancestors:
                        chain.append("reserve", key, request, unit=chain.dataset, at=at)
            for digest in unbound:
                own.append("data", digest, {}, at=at)
            transaction.add(*chains, accounts=accounts)
            return [made[key] for key in requests]

        def needs(transaction: Transaction) -> list[str]:
            transaction.ask(requests)
            return transaction.lineage(dataset)

        return self._writer.write(needs, work)

    def begin(self, key: str, attempt_id: str, units: Iterable[str]) -> None:
        """Note, durably and before their data is touched, that an attempt starts these batches.

        Raises `LedgerConflict`, and notes none of them, if one is published (`AlreadyPublished`) or
        has failed, or if the run is committed.
        """
        units = list(dict.fromkeys(units))
        check("an attempt's id", attempt_id, KEY)
        check_public("batch", units)

        def work(transaction: Transaction) -> None:
            chain, outcomes = _open_run(transaction, key, units)
            for kind, unit in outcomes:
                if kind == "publish":
                    raise AlreadyPublished(f"batch '{unit}' is published already")
            _refuse_failed(outcomes)
            known = transaction.begun(key, units, attempt_id)
            for unit in units:
                if unit not in known:
                    chain.append("begin", key, {}, unit=unit, attempt=attempt_id)
            transaction.add(chain)

        self._writer.write(_of_run(key), work)

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
        check("an attempt's id", attempt_id, KEY)
        check_public("batch", files)
        for sha256 in files.values():
            check("a file's SHA-256", sha256, SHA256)

        def work(transaction: Transaction) -> int:
            chain, outcomes = _open_run(transaction, key, list(files))
            _refuse_failed(outcomes)
            new: dict[str, dict[str, str]] = {}
            for unit, sha256 in files.items():
                release = {"attempt": attempt_id, "sha256": sha256}
                if (known := outcomes.get(("publish", unit))) is None:
                    new[unit] = release
                elif known["attempt"] != attempt_id:
                    raise AlreadyPublished(f"batch '{unit}' was published by another attempt")
                elif known != release:
                    raise LedgerConflict(f"batch '{unit}' was published with another content")
            for unit, release in new.items():
                chain.append("publish", key, release, unit=unit)
            transaction.add(chain)
            return len(new)

        return self._writer.write(_of_run(key), work)

    def fail(self, key: str, unit: str, attempt_id: str, reason_class_name: str) -> bool:
        """Note that a batch failed: it is never repeated. Of the error, only its class's name is
        kept.

        Returns True the first time; the first failure of a batch stands, and later ones answer
        False. Raises `AlreadyPublished`, and `LedgerConflict` for a committed run.
        """
        check("an attempt's id", attempt_id, KEY)
        check("the name of an error's class", reason_class_name, CLASS_NAME)
        check_public("batch", [unit])

        def work(transaction: Transaction) -> bool:
            chain, outcomes = _open_run(transaction, key, [unit])
            if ("fail", unit) in outcomes:
                return False
            if ("publish", unit) in outcomes:
                raise AlreadyPublished(f"batch '{unit}' is published already")
            failure = {"attempt": attempt_id, "reason": reason_class_name}
            chain.append("fail", key, failure, unit=unit)
            transaction.add(chain)
            return True

        return self._writer.write(_of_run(key), work)

    def commit(self, key: str) -> bool:
        """Close a run, under which nothing begins or is published from now on. Returns True the
        first time."""

        def work(transaction: Transaction) -> bool:
            chain = transaction.chain(transaction.run(key))
            if transaction.find("commit", key):
                return False
            chain.append("commit", key, {}, at=now())
            transaction.add(chain)
            return True

        return self._writer.write(_of_run(key), work)


def _of_run(key: str) -> Callable[[Transaction], list[str]]:
    return lambda transaction: [transaction.run(key)]


Outcomes = dict[tuple[str, str], dict[str, str]]
"""`Outcomes` map the kind and the unit of the entries that end something, a batch (`publish`,
`fail`) or the run (`commit`), to their payloads."""


def _open_run(transaction: Transaction, key: str, units: Sequence[str]) -> tuple[Chain, Outcomes]:
    """Return the chain of a run that is not committed, and what has become of these units."""
    chain = transaction.chain(transaction.run(key))
    outcomes = transaction.outcomes(key, units)
    if ("commit", "") in outcomes:
        raise LedgerConflict(f"the run '{key}' is committed: nothing more happens under it")
    return chain, outcomes


def _refuse_failed(outcomes: Outcomes) -> None:
    for kind, unit in outcomes:
        if kind == "fail":
            raise LedgerConflict(f"batch '{unit}' has failed: it is never repeated")


def _unbound(transaction: Transaction, dataset: str, digests: list[str]) -> list[str]:
    """Return those of the digests that belong to no data set yet. Raises `InputError` for a file of
    another data set: no second budget pays for its records."""
    owners = transaction.owners(digests)
    for owner in owners.values():
        if owner != dataset:
            raise InputError(
                f"privacy.dataset: the ledger knows this data, or a file of it, as '{owner}': it "
                "has one budget, whatever name a run gives it"
            )
    return [digest for digest in digests if digest not in owners]
