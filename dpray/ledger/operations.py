"""The writes to a ledger, as values: checked where they are asked for, and carried out in a
transaction that may carry out others too.

One reservation pays for a run's whole partition, and a unit is one row: the work of an operation
does not grow with the other units.

One set of records has one budget. Its name is the same however it is written, and a file that was
charged to one data set is refused under the name of another. The ledger knows a file by a digest of
all of its bytes under a key of its own: a copy that is edited, sorted, converted or cut in parts is
another file to it.
"""

from __future__ import annotations

import json
import shlex
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sqlalchemy as sa

from dpray.accounting.composition import Charge, RenyiComposition, composition
from dpray.accounting.event import Event
from dpray.ledger import queries
from dpray.ledger.account import Account, check_price
from dpray.ledger.chain import (
    CLASS_NAME,
    KEY,
    SHA256,
    Chain,
    Entry,
    check,
    check_name,
    check_public,
    now,
    plain,
)
from dpray.types import AlreadyPublished, Budget, InputError, LedgerConflict, LedgerError

Outcomes = dict[tuple[str, str], dict[str, str]]
"""By kind and unit, the payloads of the entries that end something: a unit (`publish`, `fail`) or
the run (`commit`, whose unit is "")."""


@dataclass(frozen=True)
class Tip:
    """A chain's end as this process last saw it committed, with its account if that was read."""

    length: int
    head: str
    account: Account | None = None


@dataclass
class Seen:
    """Committed facts that a process has read: the ends of chains, and facts that never change: the
    name of a data set by any spelling of it, and the data set of a run by its key."""

    tips: dict[str, Tip] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    runs: dict[str, str] = field(default_factory=dict)


class Transaction:
    """The data sets in one transaction that writes. No other one writes meanwhile.

    A data set whose end is still the one that this process saw last is not read again: its account
    is the one in memory. If the end is another, the one seen last has to be among the
    entries: a ledger that was put back to an earlier state is refused, however whole it is in
    itself. An operation adds its entries when nothing can refuse it any more, so that a refused one
    leaves no trace in a transaction that it shares.
    """

    def __init__(self, connection: sa.Connection, seen: Seen) -> None:
        self.connection, self._seen = connection, seen
        self._chains: dict[str, Chain] = {}
        self._accounts: dict[str, Account] = {}
        # Their first maps hold what may be this transaction's own, until it is committed.
        self._names = ChainMap({}, seen.names)
        self._runs = ChainMap({}, seen.runs)
        self._longer: set[str] = set()

    def name(self, dataset: str) -> str:
        """Return the ledger's spelling of a data set's name."""
        if dataset not in self._names:
            self._names[dataset] = queries.known_name(self.connection, dataset)
        return self._names[dataset]

    def chain(self, dataset: str) -> Chain:
        """Return the end of a chain. Raises `LedgerError` if it is not what was written."""
        if dataset not in self._chains:
            self._chains[dataset] = self._end(dataset)
        return self._chains[dataset]

    def account(self, dataset: str) -> Account:
        """Return the account of a data set. Raises `LedgerError` if an entry that counts was
        altered or is missing."""
        self.chain(dataset)
        if dataset not in self._accounts:
            self._accounts[dataset] = queries.read_account(self.connection, dataset)
        return self._accounts[dataset]

    def chain_of_run(self, charge_key: str) -> Chain:
        """Return the chain that a run is charged to. Raises `LedgerConflict` if it has none."""
        if charge_key not in self._runs:
            if (entry := queries.find(self.connection, "reserve", charge_key)) is None:
                raise LedgerConflict(f"the ledger has no reservation '{charge_key}'")
            self._runs[charge_key] = entry.dataset
        return self.chain(self._runs[charge_key])

    def open_run(self, charge_key: str, units: Sequence[str]) -> tuple[Chain, Outcomes]:
        """Return the chain of a run, and the outcomes of these units. Raises `LedgerConflict` if
        the run is committed."""
        chain = self.chain_of_run(charge_key)
        outcomes = {
            (kind, unit): json.loads(payload)
            for kind, unit, payload in queries.outcomes(self.connection, charge_key, ["", *units])
        }
        if ("commit", "") in outcomes:
            raise LedgerConflict(
                f"the run '{charge_key}' is committed: nothing more happens under it"
            )
        return chain, outcomes

    def add(self, chain: Chain) -> None:
        """Write the new entries of a chain. Nothing may refuse the operation from here on."""
        if rows := [vars(entry) for entry in chain.added]:
            self.connection.execute(queries.INSERT, rows)
            chain.added.clear()
            self._longer.add(chain.dataset)

    def add_charges(self, chain: Chain, account: Account) -> None:
        """Write the new entries of a chain, which add up to `account`."""
        self.add(chain)
        self._accounts[chain.dataset] = account

    def add_dataset(self, chain: Chain) -> None:
        """Write a new data set."""
        row = {"name": chain.dataset, **chain.end}
        self.connection.execute(sa.insert(queries.datasets), row)
        self._chains[chain.dataset] = chain
        self.add(chain)

    def write_ends(self) -> None:
        """Write the new ends of all chains; the last statement before the commit."""
        if self._longer:
            ends = [{"own": name, **self._chains[name].end} for name in sorted(self._longer)]
            self.connection.execute(queries.SET_END, ends)

    def remember(self) -> None:
        """Keep the facts that this transaction has read and written; it has to be committed."""
        self._seen.names |= self._names.maps[0]
        self._seen.runs |= self._runs.maps[0]
        self._seen.tips |= {
            name: Tip(chain.length, chain.head, self._accounts.get(name))
            for name, chain in self._chains.items()
        }

    def _end(self, dataset: str) -> Chain:
        chain = queries.end(self.connection, dataset)
        tip = self._seen.tips.get(dataset)
        if tip is not None and (tip.length, tip.head) == (chain.length, chain.head):
            if tip.account is not None:
                self._accounts[dataset] = tip.account
            return chain
        if tip is not None:
            before = queries.entry_at(self.connection, dataset, tip.length - 1)
            if before is None or before.hash != tip.head:
                raise LedgerError(
                    f"the ledger's entries of '{dataset}' are not those that were there before: it "
                    "was put back to an earlier state, or replaced by another; nothing is charged "
                    "to it until somebody has looked (see `dpray ledger verify --contains`)"
                )
        queries.check_end(self.connection, chain)
        return chain


class Operation:
    """A write. It is refused by a `DprayError`, and nothing of it is written then."""

    def check(self) -> None:
        """Refuse input that no ledger would keep, before a transaction begins."""

    def apply(self, transaction: Transaction) -> Any:
        """Carry out the write and return its answer. All lookups come before all changes."""
        raise NotImplementedError


@dataclass(frozen=True)
class CreateDataset(Operation):
    """Give a data set its budget: see `RunLedger.create_dataset`."""

    name: str
    budget: Budget
    privacy_unit: str
    neighboring_relation: str
    composition: str = "basic"
    order: float | None = None

    def check(self) -> None:
        self.account()
        check_public("the name of a privacy unit", [self.privacy_unit])

    def apply(self, transaction: Transaction) -> None:
        terms = plain(self.account().terms())
        if (known := queries.stored_name(transaction.connection, self.name)) is None:
            transaction.add_dataset(self.chain())
            return
        account = transaction.account(known)
        first = queries.entry_at(transaction.connection, known, 0)
        created = account if first is None else Account.replay([first])
        if terms not in (plain(created.terms()), plain(account.terms())):
            raise InputError(
                f"data set '{known}' has another budget in the ledger already: {account.budget} "
                f"per {account.privacy_unit}, {account.composition.name}; `dpray ledger raise` "
                "makes it larger, on record"
            )

    def chain(self) -> Chain:
        """Return the beginning of the data set's chain, not written yet."""
        chain = Chain(check_name(self.name))
        chain.append("create", chain.dataset, plain(self.account().terms()), at=now())
        return chain

    def account(self) -> Account:
        """Return the account of the new data set. Raises `InputError` for one that cannot be."""
        if self.composition != RenyiComposition.name and self.order is not None:
            raise InputError("an order belongs to a budget with the composition renyi")
        try:
            rule = composition(self.composition, self.budget, self.order)
        except ValueError as error:
            raise InputError(f"data set '{self.name}': {error}") from error
        stated_for = self.privacy_unit, self.neighboring_relation
        return Account(self.name, rule, *stated_for, total=rule.total(()))


@dataclass(frozen=True)
class RaiseBudget(Operation):
    """Make a data set's budget larger: see `RunLedger.raise_budget`. None leaves a part as it
    is."""

    dataset: str
    epsilon: float | None
    delta: float | None
    reason: str

    def check(self) -> None:
        check_public("a reason", [self.reason.strip()], 1000)

    def apply(self, transaction: Transaction) -> Account:
        name = transaction.name(self.dataset)
        account, chain = transaction.account(name), transaction.chain(name)
        budget = Budget(
            account.budget.epsilon if self.epsilon is None else self.epsilon,
            account.budget.delta if self.delta is None else self.delta,
        )
        content = {"budget": vars(budget), "reason": self.reason.strip()}
        if account.raises and account.raises[-1].values() == content:
            return account
        account.check_raise(budget)
        number = str(len(account.raises))
        entry = chain.append("raise", name, content, unit=number, at=now())
        rule = replace(account.composition, budget=budget)
        account = replace(account, composition=rule, raises=(*account.raises, entry))
        transaction.add_charges(chain, account)
        return account


@dataclass(frozen=True)
class Reserve(Operation):
    """Charge a run: see `RunLedger.reserve`."""

    dataset: str
    charges: Mapping[str, tuple[Event, Budget]]
    privacy_unit: str
    neighboring_relation: str
    files: tuple[bytes, ...] = ()
    is_trial: bool = False
    new_budget: Budget | None = None

    def check(self) -> None:
        if self.new_budget is not None:
            self._creation(self.new_budget).check()
        for key, (event, asked) in self.charges.items():
            check("a reservation's key", key, KEY)
            check_price(event, asked)

    def apply(self, transaction: Transaction) -> list[Entry]:
        known = queries.stored_name(transaction.connection, self.dataset)
        if is_new := known is None and self.new_budget is not None:
            creation = self._creation(self.new_budget)
            account, chain = creation.account(), creation.chain()
        else:
            name = transaction.name(self.dataset)
            account, chain = transaction.account(name), transaction.chain(name)
        name = chain.dataset
        payloads = {key: plain(self._payload(*charge)) for key, charge in self.charges.items()}
        made = queries.find_all(transaction.connection, "reserve", payloads)
        for key, payload in payloads.items():
            if (entry := made.get(key)) is None:
                charge = Charge(*self.charges[key])
                account = account.admit(charge, self.privacy_unit, self.neighboring_relation)
            elif entry.dataset != name or entry.values() != payload:
                raise LedgerConflict(f"the key '{key}' was reserved for another charge")
        unbound = self._unbound(transaction.connection, name)
        if self.is_trial:
            return list(made.values())
        # From here on nothing refuses the run.
        if is_new:
            transaction.add_dataset(chain)
        at = now()
        for key, payload in payloads.items():
            if key not in made:
                made[key] = chain.append("reserve", key, payload, at=at)
        for digest in unbound:
            chain.append("data", digest, {}, at=at)
        transaction.add_charges(chain, account)
        return [made[key] for key in payloads]

    def _creation(self, budget: Budget) -> CreateDataset:
        return CreateDataset(self.dataset, budget, self.privacy_unit, self.neighboring_relation)

    def _payload(self, event: Event, asked: Budget) -> dict[str, Any]:
        return {
            "event": event.to_json(),
            "epsilon": asked.epsilon,
            "delta": asked.delta,
            "privacy_unit": self.privacy_unit,
            "neighboring_relation": self.neighboring_relation,
        }

    def _unbound(self, connection: sa.Connection, dataset: str) -> list[str]:
        """Return the digests of the files that belong to no data set yet. Raises `InputError` for
        a file of another data set: no second budget pays for its records."""
        digests = queries.file_digests(connection, dict.fromkeys(self.files))
        owners = queries.find_all(connection, "data", digests)
        for entry in owners.values():
            if entry.dataset != dataset:
                raise InputError(
                    "privacy.dataset: the ledger knows this data, or a file of it, as "
                    f"'{entry.dataset}': it has one budget, whatever name a run gives it; set "
                    f"privacy.dataset={shlex.quote(entry.dataset)}"
                )
        return [digest for digest in digests if digest not in owners]


@dataclass(frozen=True)
class Begin(Operation):
    """Start units: see `RunLedger.begin`."""

    charge_key: str
    attempt_id: str
    units: tuple[str, ...]

    def check(self) -> None:
        check("an attempt's id", self.attempt_id, KEY)
        check_public("the name of a batch", self.units)

    def apply(self, transaction: Transaction) -> None:
        chain, outcomes = transaction.open_run(self.charge_key, self.units)
        for kind, unit in outcomes:
            if kind == "publish":
                raise AlreadyPublished(f"batch '{unit}' is published already")
        _refuse_failed(outcomes)
        known = queries.begun(transaction.connection, self.charge_key, self.units, self.attempt_id)
        for unit in self.units:
            if unit not in known:
                chain.append("begin", self.charge_key, {}, unit=unit, attempt=self.attempt_id)
        transaction.add(chain)


@dataclass(frozen=True)
class Publish(Operation):
    """Publish units: see `RunLedger.publish`."""

    charge_key: str
    attempt_id: str
    releases: tuple[tuple[str, str], ...]

    def check(self) -> None:
        units = [unit for unit, _ in self.releases]
        if len(set(units)) < len(units):
            raise LedgerConflict("a batch has one release, not two")
        check("an attempt's id", self.attempt_id, KEY)
        check_public("the name of a batch", units)
        for _, sha256 in self.releases:
            check("a file's SHA-256", sha256, SHA256)

    def apply(self, transaction: Transaction) -> int:
        files = dict(self.releases)
        chain, outcomes = transaction.open_run(self.charge_key, list(files))
        _refuse_failed(outcomes)
        new: dict[str, dict[str, str]] = {}
        for unit, sha256 in files.items():
            release = {"attempt": self.attempt_id, "sha256": sha256}
            if (known := outcomes.get(("publish", unit))) is None:
                new[unit] = release
            elif known["attempt"] != self.attempt_id:
                raise AlreadyPublished(f"batch '{unit}' was published by another attempt")
            elif known != release:
                raise LedgerConflict(f"batch '{unit}' was published with another content")
        for unit, release in new.items():
            chain.append("publish", self.charge_key, release, unit=unit)
        transaction.add(chain)
        return len(new)


@dataclass(frozen=True)
class Fail(Operation):
    """Mark a unit as failed: see `RunLedger.fail`."""

    charge_key: str
    unit: str
    attempt_id: str
    reason_class_name: str

    def check(self) -> None:
        check("an attempt's id", self.attempt_id, KEY)
        check("the name of an error's class", self.reason_class_name, CLASS_NAME)
        check_public("the name of a batch", [self.unit])

    def apply(self, transaction: Transaction) -> bool:
        chain, outcomes = transaction.open_run(self.charge_key, [self.unit])
        if ("fail", self.unit) in outcomes:
            return False
        if ("publish", self.unit) in outcomes:
            raise AlreadyPublished(f"batch '{self.unit}' is published already")
        failure = {"attempt": self.attempt_id, "reason": self.reason_class_name}
        chain.append("fail", self.charge_key, failure, unit=self.unit)
        transaction.add(chain)
        return True


@dataclass(frozen=True)
class Commit(Operation):
    """Close a run: see `RunLedger.commit`."""

    charge_key: str

    def apply(self, transaction: Transaction) -> bool:
        chain = transaction.chain_of_run(self.charge_key)
        if queries.find(transaction.connection, "commit", self.charge_key):
            return False
        chain.append("commit", self.charge_key, {}, at=now())
        transaction.add(chain)
        return True


def _refuse_failed(outcomes: Outcomes) -> None:
    for kind, unit in outcomes:
        if kind == "fail":
            raise LedgerConflict(f"batch '{unit}' has failed: it is never repeated")
