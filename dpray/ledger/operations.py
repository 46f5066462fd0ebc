"""The writes to a ledger, as values: made and checked where they are asked for, carried out in a
transaction that may carry out others too.

One reservation pays for a run's whole partition; a unit is one row, and the work of a `Reserve` or
a `Publish` does not grow with the other units (beyond the index's logarithm).

One set of records has one budget. Its name is the same however it is written, and a file that was
charged to one data set is refused under the name of another. The ledger knows a file by a digest of
all of its bytes under a key of its own: a copy that is edited, sorted, converted or cut in parts is
another file to it.

A budget may be shared out: each tenant (a team, a project) then has a cap of its own inside it. And
a data set may be the child of another, a subset or a derived table of the same people: whatever is
charged to it is drawn on its parent, and on the parent's parent, in the same transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from dpray.accounting.composition import Charge, RenyiComposition, composition
from dpray.accounting.event import Event
from dpray.ledger.account import Account, admit, check_price
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
from dpray.ledger.errors import AlreadyPublished, LedgerConflict
from dpray.ledger.store import file_digests
from dpray.ledger.transaction import Outcomes, Transaction, find, find_all, stored_name
from dpray.types import Budget, InputError


class Operation:
    """A write. What refuses it raises a `DprayError`, and nothing of it is written."""

    def check(self) -> None:
        """Refuse what no ledger would keep, before a transaction begins."""

    def apply(self, transaction: Transaction) -> Any:
        """Carry out the write and return its answer. All lookups come before all changes."""
        raise NotImplementedError

    def with_prefix(self, prefix: str) -> Operation:
        """Return the operation with `prefix` before the names of its units."""
        return self


@dataclass(frozen=True)
class CreateDataset(Operation):
    """Give a data set its budget: see `Ledger.create_dataset`."""

    name: str
    budget: Budget
    privacy_unit: str
    neighboring_relation: str
    composition: str = "basic"
    order: float | None = None
    parent: str | None = None

    def check(self) -> None:
        self._account()
        check_public("privacy unit", [self.privacy_unit])

    def apply(self, transaction: Transaction) -> None:
        known = stored_name(transaction.connection, self.name)
        above = None
        if self.parent is not None:
            above = transaction.account(transaction.lineage(self.parent)[0])
        terms = plain(self._account().below(above).terms())
        if known is None:
            chain = Chain(check_name("data set", self.name))
            chain.append("create", chain.dataset, terms, at=now())
            transaction.add_dataset(chain)
        elif plain(transaction.account(known).terms()) != terms:
            raise InputError(f"data set '{known}' has another budget in the ledger already")

    def _account(self) -> Account:
        if self.composition != RenyiComposition.name and self.order is not None:
            raise InputError("an order belongs to a budget with the composition renyi")
        try:
            rule = composition(self.composition, self.budget, self.order)
        except ValueError as error:
            raise InputError(f"data set '{self.name}': {error}") from error
        return Account(self.name, rule, self.privacy_unit, self.neighboring_relation)


@dataclass(frozen=True)
class CreateTenant(Operation):
    """Give a tenant its cap on a data set: see `Ledger.create_tenant`."""

    dataset: str
    tenant: str
    budget: Budget

    def check(self) -> None:
        check_name("tenant", self.tenant)

    def apply(self, transaction: Transaction) -> None:
        own = transaction.lineage(self.dataset)[0]
        name, account = check_name("tenant", self.tenant), transaction.account(own)
        if name not in account.tenants:
            chain = transaction.chain(own)
            entry = chain.append(
                "create", own, plain(account.cap(name, self.budget)), unit=name, at=now()
            )
            transaction.add(chain, accounts=[account.with_tenant(entry)])
        elif account.tenants[name].budget != self.budget:
            raise InputError(f"the tenant '{name}' has another budget on '{own}' already")


@dataclass(frozen=True)
class Reserve(Operation):
    """Charge a run: see `RunLedger.reserve`."""

    dataset: str
    charges: Mapping[str, tuple[Event, Budget]]
    privacy_unit: str
    neighboring_relation: str
    files: tuple[bytes, ...] = ()
    tenant: str | None = None

    def check(self) -> None:
        for key, (event, asked) in self.charges.items():
            check("a reservation's key", key, KEY)
            check_price(event, asked)

    def apply(self, transaction: Transaction) -> list[Entry]:
        names = transaction.lineage(self.dataset)
        accounts = [transaction.account(name) for name in names]
        own, *ancestors = chains = [transaction.chain(name) for name in names]
        payloads = {key: self._payload(*charge) for key, charge in self.charges.items()}
        made = find_all(transaction.connection, "reserve", payloads)
        for key, payload in payloads.items():
            if (entry := made.get(key)) is None:
                charge = Charge(*self.charges[key], self.tenant)
                accounts = admit(accounts, charge, self.privacy_unit, self.neighboring_relation)
            elif entry.dataset != own.dataset or entry.values() != payload:
                raise LedgerConflict(f"the key '{key}' was reserved for another charge")
        unbound = self._unbound(transaction.connection, own.dataset)
        # From here on nothing refuses the run.
        at = now()
        for key, payload in payloads.items():
            if key not in made:
                made[key] = own.append("reserve", key, payload, at=at)
                for chain in ancestors:
                    chain.append("reserve", key, payload, unit=chain.dataset, at=at)
        for digest in unbound:
            own.append("data", digest, {}, at=at)
        transaction.add(*chains, accounts=accounts)
        return [made[key] for key in payloads]

    def _payload(self, event: Event, asked: Budget) -> dict[str, Any]:
        payload = {
            "event": event.to_json(),
            "epsilon": asked.epsilon,
            "delta": asked.delta,
            "privacy_unit": self.privacy_unit,
            "neighboring_relation": self.neighboring_relation,
        }
        return plain(payload if self.tenant is None else payload | {"tenant": self.tenant})

    def _unbound(self, connection: sa.Connection, dataset: str) -> list[str]:
        """Return the digests of the files that belong to no data set yet. Raises `InputError` for
        a file of another data set: no second budget pays for its records."""
        if not self.files:
            return []
        digests = file_digests(connection, dict.fromkeys(self.files))
        owners = find_all(connection, "data", digests)
        for entry in owners.values():
            if entry.dataset != dataset:
                raise InputError(
                    "privacy.dataset: the ledger knows this data, or a file of it, as "
                    f"'{entry.dataset}': it has one budget, whatever name a run gives it"
                )
        return [digest for digest in digests if digest not in owners]


@dataclass(frozen=True)
class Begin(Operation):
    """Start units: see `RunLedger.begin`."""

    key: str
    attempt_id: str
    units: tuple[str, ...]

    def check(self) -> None:
        check("an attempt's id", self.attempt_id, KEY)
        check_public("batch", self.units)

    def apply(self, transaction: Transaction) -> None:
        chain, outcomes = transaction.open_run(self.key, self.units)
        for kind, unit in outcomes:
            if kind == "publish":
                raise AlreadyPublished(f"batch '{unit}' is published already")
        _refuse_failed(outcomes)
        known = transaction.begun(self.key, self.units, self.attempt_id)
        for unit in self.units:
            if unit not in known:
                chain.append("begin", self.key, {}, unit=unit, attempt=self.attempt_id)
        transaction.add(chain)

    def with_prefix(self, prefix: str) -> Begin:
        return replace(self, units=tuple(prefix + unit for unit in self.units))


@dataclass(frozen=True)
class Publish(Operation):
    """Publish units: see `RunLedger.publish`."""

    key: str
    attempt_id: str
    releases: tuple[tuple[str, str], ...]

    def check(self) -> None:
        units = [unit for unit, _ in self.releases]
        if len(set(units)) < len(units):
            raise LedgerConflict("a batch has one release, not two")
        check("an attempt's id", self.attempt_id, KEY)
        check_public("batch", units)
        for _, sha256 in self.releases:
            check("a file's SHA-256", sha256, SHA256)

    def apply(self, transaction: Transaction) -> int:
        files = dict(self.releases)
        chain, outcomes = transaction.open_run(self.key, list(files))
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
            chain.append("publish", self.key, release, unit=unit)
        transaction.add(chain)
        return len(new)

    def with_prefix(self, prefix: str) -> Publish:
        return replace(self, releases=tuple((prefix + unit, sha) for unit, sha in self.releases))


@dataclass(frozen=True)
class Fail(Operation):
    """Mark a unit as failed: see `RunLedger.fail`."""

    key: str
    unit: str
    attempt_id: str
    reason_class_name: str

    def check(self) -> None:
        check("an attempt's id", self.attempt_id, KEY)
        check("the name of an error's class", self.reason_class_name, CLASS_NAME)
        check_public("batch", [self.unit])

    def apply(self, transaction: Transaction) -> bool:
        chain, outcomes = transaction.open_run(self.key, [self.unit])
        if ("fail", self.unit) in outcomes:
            return False
        if ("publish", self.unit) in outcomes:
            raise AlreadyPublished(f"batch '{self.unit}' is published already")
        failure = {"attempt": self.attempt_id, "reason": self.reason_class_name}
        chain.append("fail", self.key, failure, unit=self.unit)
        transaction.add(chain)
        return True

    def with_prefix(self, prefix: str) -> Fail:
        return replace(self, unit=prefix + self.unit)


@dataclass(frozen=True)
class Commit(Operation):
    """Close a run: see `RunLedger.commit`."""

    key: str

    def apply(self, transaction: Transaction) -> bool:
        chain = transaction.chain(transaction.dataset_of(self.key))
        if find(transaction.connection, "commit", self.key):
            return False
        chain.append("commit", self.key, {}, at=now())
        transaction.add(chain)
        return True


def _refuse_failed(outcomes: Outcomes) -> None:
    for kind, unit in outcomes:
        if kind == "fail":
            raise LedgerConflict(f"batch '{unit}' has failed: it is never repeated")
