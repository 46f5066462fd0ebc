"""One transaction that writes to a ledger. Its methods are the operations of `RunLedger`, which
checks their input and states their contracts; a transaction may carry out several.

One reservation pays for a run's whole partition, and a unit is one row: the work of an operation
does not grow with the other units.

One set of records has one budget. Its name is the same however it is written, and a file that was
charged to one data set is refused under the name of another. The ledger knows a file by a digest of
all of its bytes under a key of its own: a copy that is edited, sorted, converted or cut in parts is
another file to it.
"""

from __future__ import annotations

import json
import math
import shlex
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import sqlalchemy as sa

from dpray.accounting.composition import Charge
from dpray.accounting.event import Event, accountant_version
from dpray.ledger import queries
from dpray.ledger.account import RELATIVE_CHANGE, RELATIVE_ROUNDING, Account
from dpray.ledger.chain import Chain, Entry, now, plain
from dpray.types import (
    AlreadyPublished,
    Budget,
    InputError,
    LedgerConflict,
    LedgerError,
    ReadOnlyJson,
)

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
    itself. An operation is refused by a `DprayError`, and leaves no trace then in the transaction
    that it shares with others: it adds its entries when nothing can refuse it any more.
    """

    def __init__(self, connection: sa.Connection, seen: Seen) -> None:
        self.connection, self._seen = connection, seen
        self._chains: dict[str, Chain] = {}
        self._accounts: dict[str, Account] = {}
        # Their first maps hold what may be this transaction's own, until it is committed.
        self._names = ChainMap({}, seen.names)
        self._runs = ChainMap({}, seen.runs)
        self._longer: set[str] = set()

    # Operations

    def create_dataset(self, new: Account) -> None:
        """Add a data set: see `RunLedger.create_dataset`."""
        terms = plain(new.terms())
        if (known := queries.stored_name(self.connection, new.dataset)) is None:
            self.add_dataset(_beginning(new))
            return
        account = self.account(known)
        first = queries.entry_at(self.connection, known, 0)
        created = account if first is None else Account.replay([first])
        if terms not in (plain(created.terms()), plain(account.terms())):
            raise InputError(
                f"data set '{known}' has another budget in the ledger already: {account.budget} "
                f"per {account.privacy_unit}, {account.composition.name}; `dpray ledger raise` "
                "makes it larger, on record"
            )

    def raise_budget(
        self, dataset: str, epsilon: float | None, delta: float | None, reason: str
    ) -> Account:
        """Make a budget larger: see `RunLedger.raise_budget`."""
        name = self.name(dataset)
        account, chain = self.account(name), self.chain(name)
        budget = Budget(
            account.budget.epsilon if epsilon is None else epsilon,
            account.budget.delta if delta is None else delta,
        )
        content = {"budget": vars(budget), "reason": reason}
        if account.raises and account.raises[-1].values() == content:
            return account
        account.check_raise(budget)
        number = str(len(account.raises))
        entry = chain.append("raise", name, content, unit=number, at=now())
        rule = replace(account.composition, budget=budget)
        account = replace(account, composition=rule, raises=(*account.raises, entry))
        self.add(chain, account)
        return account

    def reserve(
        self,
        dataset: str,
        charges: Mapping[str, tuple[Event, Budget]],
        privacy_unit: str,
        neighboring_relation: str,
        files: Sequence[bytes] = (),
        new: Account | None = None,
        *,
        is_trial: bool = False,
    ) -> list[Entry]:
        """Charge a run: see `RunLedger.reserve`. A data set that is missing is added as `new`."""
        if is_new := new is not None and queries.stored_name(self.connection, dataset) is None:
            account, chain = new, _beginning(new)
        else:
            name = self.name(dataset)
            account, chain = self.account(name), self.chain(name)
        name = chain.dataset
        stated_for = {"privacy_unit": privacy_unit, "neighboring_relation": neighboring_relation}
        by = {"accountant": accountant_version()}
        payloads = {
            key: plain({"event": event.to_json(), **vars(asked), **stated_for, **by})
            for key, (event, asked) in charges.items()
        }
        made = queries.find_all(self.connection, "reserve", payloads)
        for key, payload in payloads.items():
            if (entry := made.get(key)) is None:
                account = account.admit(Charge(*charges[key]), **stated_for)
            elif entry.dataset != name or not _same_charge(entry.values(), payload):
                raise LedgerConflict(f"the key '{key}' was reserved for another charge")
        unbound = _unbound(self.connection, name, files)
        if is_trial:
            return list(made.values())
        # From here on nothing refuses the run.
        if is_new:
            self.add_dataset(chain)
        at = now()
        for key, payload in payloads.items():
            if key not in made:
                made[key] = chain.append("reserve", key, payload, at=at)
        for digest in unbound:
            chain.append("data", digest, {}, at=at)
        self.add(chain, account)
        return [made[key] for key in payloads]

    def begin(self, charge_key: str, attempt_id: str, units: Sequence[str]) -> None:
        """Start units: see `RunLedger.begin`."""
        chain, outcomes = self.open_run(charge_key, units)
        for kind, unit in outcomes:
            if kind == "publish":
                raise AlreadyPublished(f"batch '{unit}' is published already")
        _refuse_failed(outcomes)
        known = queries.begun(self.connection, charge_key, units, attempt_id)
        for unit in units:
            if unit not in known:
                chain.append("begin", charge_key, {}, unit=unit, attempt=attempt_id)
        self.add(chain)

    def publish(self, charge_key: str, attempt_id: str, releases: Sequence[tuple[str, str]]) -> int:
        """Publish units: see `RunLedger.publish`."""
        files = dict(releases)
        chain, outcomes = self.open_run(charge_key, list(files))
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
            chain.append("publish", charge_key, release, unit=unit)
        self.add(chain)
        return len(new)

    def fail(self, charge_key: str, unit: str, attempt_id: str, reason_class_name: str) -> bool:
        """Mark a unit as failed: see `RunLedger.fail`."""
        chain, outcomes = self.open_run(charge_key, [unit])
        if ("fail", unit) in outcomes:
            return False
        if ("publish", unit) in outcomes:
            raise AlreadyPublished(f"batch '{unit}' is published already")
        failure = {"attempt": attempt_id, "reason": reason_class_name}
        chain.append("fail", charge_key, failure, unit=unit)
        self.add(chain)
        return True

    def commit(self, charge_key: str) -> bool:
        """Close a run: see `RunLedger.commit`."""
        chain = self.chain_of_run(charge_key)
        if queries.find(self.connection, "commit", charge_key):
            return False
        chain.append("commit", charge_key, {}, at=now())
        self.add(chain)
        return True

    # What they read and write

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

    def add(self, chain: Chain, account: Account | None = None) -> None:
        """Write the new entries of a chain, which add up to `account` if some are charges. Nothing
        may refuse the operation from here on."""
        if rows := [vars(entry) for entry in chain.added]:
            self.connection.execute(queries.INSERT, rows)
            chain.added.clear()
            self._longer.add(chain.dataset)
        if account is not None:
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


def _beginning(new: Account) -> Chain:
    """Return the beginning of a new data set's chain, not written yet."""
    chain = Chain(new.dataset)
    chain.append("create", chain.dataset, plain(new.terms()), at=now())
    return chain


def _same_charge(made: ReadOnlyJson, asked: ReadOnlyJson) -> bool:
    """Return whether two payloads charge for the same event. A run may be resumed by a later
    version, whose accountant finds less, or a little more: it keeps its charge."""
    same_event = all(
        made.get(key) == asked.get(key) for key in {*made, *asked} - {"accountant", "epsilon"}
    )
    if made.get("accountant") == asked["accountant"]:
        return same_event and math.isclose(
            made["epsilon"], asked["epsilon"], rel_tol=RELATIVE_ROUNDING
        )
    covered: float = made["epsilon"] * (1 + RELATIVE_CHANGE)
    return same_event and asked["epsilon"] <= covered


def _unbound(connection: sa.Connection, dataset: str, files: Sequence[bytes]) -> list[str]:
    """Return the ledger's digests of the files that belong to no data set yet. Raises `InputError`
    for a file of another data set: no second budget pays for its records."""
    digests = queries.file_digests(connection, dict.fromkeys(files))
    owners = queries.find_all(connection, "data", digests)
    for entry in owners.values():
        if entry.dataset != dataset:
            raise InputError(
                "privacy.dataset: the ledger knows this data, or a file of it, as "
                f"'{entry.dataset}': it has one budget, whatever name a run gives it; set "
                f"privacy.dataset={shlex.quote(entry.dataset)}"
            )
    return [digest for digest in digests if digest not in owners]


def _refuse_failed(outcomes: Outcomes) -> None:
    for kind, unit in outcomes:
        if kind == "fail":
            raise LedgerConflict(f"batch '{unit}' has failed: it is never repeated")
