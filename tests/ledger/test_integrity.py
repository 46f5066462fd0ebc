"""A ledger that was altered, cut off, deleted, or cannot be written: nothing is undercounted."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from dpray.accounting import accountant
from dpray.accounting.composed_events import SelfComposed, event_from_json
from dpray.accounting.event import accountant_version, canonical_json
from dpray.accounting.events import DiscreteLaplace, Gaussian, PoissonSubsampledGaussian
from dpray.ledger import queries
from dpray.ledger.account import Account
from dpray.ledger.chain import Chain, Entry
from dpray.ledger.ledger import Ledger
from dpray.ledger.store import Store, parse_url
from dpray.types import Budget, BudgetRefused, InputError, LedgerConflict, LedgerError
from tests.ledger.charges import BUDGET, SHA, STATED_FOR, TENTH, listener, reserve


@pytest.fixture
def ledger(url: str) -> Ledger:
    """One data set and the entries 0 create, 1 and 2 reserve, 3 and 4 begin, 5 publish, 6 fail,
    7 commit."""
    ledger = Ledger.create_or_open(url)
    ledger.create_dataset("notes", BUDGET, *STATED_FOR)
    reserve(ledger, "run-1")
    reserve(ledger, "run-2")
    ledger.begin("run-1", "attempt-1", ["a/0", "a/1"])
    ledger.publish("run-1", "attempt-1", [("a/0", SHA)])
    ledger.fail("run-1", "a/1", "attempt-1", "ValueError")
    ledger.commit("run-1")
    return ledger


@pytest.fixture
def edit(url: str, ledger: Ledger) -> Iterator[Callable[[str], None]]:
    """Run a statement behind the ledger's back."""
    engine = sa.create_engine(parse_url(url), poolclass=sa.NullPool)

    def run(statement: str) -> None:
        with engine.begin() as connection:
            assert connection.exec_driver_sql(statement).rowcount > 0

    yield run
    engine.dispose()


EDITS = {
    "a smaller charge": "UPDATE dpray_entries SET payload = replace(payload, '0.1', '0.01') "
    "WHERE seq = 1",
    "a larger budget": "UPDATE dpray_entries SET payload = replace(payload, '1.0', '9.0') "
    "WHERE seq = 0",
    "another unit": "UPDATE dpray_entries SET unit = 'a/7' WHERE seq = 5",
    "another attempt": "UPDATE dpray_entries SET attempt = 'attempt-9' WHERE seq = 3",
    "another time": "UPDATE dpray_entries SET at = '2001-01-01T00:00:00+00:00' WHERE seq = 1",
    "another hash": "UPDATE dpray_entries SET hash = prev_hash WHERE seq = 4",
    "a row in the middle": "DELETE FROM dpray_entries WHERE seq = 2",
    "the last row": "DELETE FROM dpray_entries WHERE seq = 7",
    "the tail": "DELETE FROM dpray_entries WHERE seq > 1",
    "all entries": "DELETE FROM dpray_entries",
    "the data set's row": "DELETE FROM dpray_datasets",
    "a shorter chain": "UPDATE dpray_datasets SET length = 7",
    "another number of charges": "UPDATE dpray_datasets SET reservations = 1",
    "another head": "UPDATE dpray_datasets SET head = 'x'",
    "the first row": "DELETE FROM dpray_entries WHERE kind = 'create'",
}


NO_CHARGE = {"another unit", "another attempt", "another time", "another hash"}
"""Edits that leave the charges and the ends of the chain as they were."""


@pytest.mark.parametrize("change", EDITS)
def test_verify_sees_every_edit_and_nothing_more_is_charged_to_an_edited_chain(
    ledger: Ledger, url: str, edit: Callable[[str], None], change: str
):
    assert ledger.verify() == []
    edit(EDITS[change])
    assert ledger.verify()
    if change not in NO_CHARGE:
        with pytest.raises(LedgerError, match="not as they were written"):
            reserve(Ledger.open(url), "run-3")


@pytest.mark.parametrize("change", ["a smaller charge", "a row in the middle"])
def test_who_has_seen_the_charges_counts_them_whatever_was_edited_since(
    ledger: Ledger, edit: Callable[[str], None], change: str
):
    edit(EDITS[change])
    for run in range(3, 11):
        reserve(ledger, f"run-{run}")
    with pytest.raises(BudgetRefused):
        reserve(ledger, "run-11")
    assert ledger.verify()


@pytest.mark.parametrize("change", ["all entries", "the data set's row"])
def test_a_dataset_that_lost_half_of_itself_is_not_made_anew(
    url: str, edit: Callable[[str], None], change: str
):
    edit(EDITS[change])
    with pytest.raises(LedgerError, match="not as they were written"):
        Ledger.open(url).create_dataset("notes", BUDGET, *STATED_FOR)


def test_verify_sees_a_charge_that_never_covered_its_event(url: str, ledger: Ledger):
    """The hashes are all right here: only the cost, computed again, tells."""
    rows = [dict(row) for row in ledger.export()]
    rows[2]["payload"] |= {"event": DiscreteLaplace(2.0, 1).to_json(), "privacy_unit": "patient"}
    head, engine = "0" * 64, sa.create_engine(parse_url(url))
    with engine.begin() as connection:
        for row in rows:
            payload = canonical_json(row["payload"])
            entry = Entry(**row | {"payload": payload, "prev_hash": head, "hash": ""})
            head = entry.digest()
            connection.execute(
                sa.text(
                    "UPDATE dpray_entries SET payload = :payload, prev_hash = :prev, hash = :hash "
                    "WHERE seq = :seq"
                ),
                {"payload": payload, "prev": entry.prev_hash, "hash": head, "seq": entry.seq},
            )
        connection.execute(sa.text("UPDATE dpray_datasets SET head = :head"), {"head": head})
    problems = ledger.verify()
    assert len(problems) == 2
    assert any("does not cover its event" in problem for problem in problems)
    assert any("privacy_unit" in problem for problem in problems)


def test_a_charge_that_an_older_version_made_is_no_problem(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
):
    """Older versions left no room for the rounding of the FFT."""
    event = SelfComposed(PoissonSubsampledGaussian(0.01, 4.0), 1000)
    monkeypatch.setattr(accountant, "FFT_ROUNDING", 0.0)
    accountant.cost.cache_clear()
    monkeypatch.setattr("dpray.ledger.transaction.accountant_version", lambda: "1")
    old = accountant.cost(event, 1e-6)
    ledger.create_dataset("old", BUDGET, *STATED_FOR)
    ledger.reserve("old", {"run-3": (event, Budget(old.epsilon, 1e-6))}, *STATED_FOR)
    monkeypatch.undo()
    accountant.cost.cache_clear()
    assert accountant.cost(event, 1e-6).epsilon > old.epsilon * (1 + 1e-9)
    assert ledger.verify() == []


@pytest.mark.parametrize(
    ("by", "share", "is_seen"),
    [
        ({"accountant": accountant_version()}, 1 - 5e-10, False),
        ({"accountant": accountant_version()}, 1 - 2e-9, True),
        ({"accountant": "another"}, 1 - 0.019, False),
        ({"accountant": "another"}, 1 - 0.021, True),
        ({}, 1 - 0.019, False),
        ({}, 1 - 0.021, True),
    ],
)
def test_verify_sees_a_charge_below_its_price(
    ledger: Ledger, url: str, by: dict[str, str], share: float, is_seen: bool
):
    """The whole chain is written by hand. Another version's bounds may be a little smaller."""
    event = SelfComposed(PoissonSubsampledGaussian(0.01, 4.0), 1000)
    asked = Budget(accountant.cost(event, 1e-6).epsilon * share, 1e-6)
    ledger.create_dataset("own", BUDGET, *STATED_FOR)
    [created] = [row for row in ledger.export() if row["dataset"] == "own"]
    chain = Chain("own", 1, created["hash"])
    terms = dict(zip(("privacy_unit", "neighboring_relation"), STATED_FOR, strict=True))
    chain.append("reserve", "run-9", {"event": event.to_json(), **vars(asked), **terms, **by})
    store = Store(url, create=False)
    with store.begin() as connection:
        connection.execute(queries.INSERT, [vars(entry) for entry in chain.added])
        connection.execute(queries.SET_END, [{"own": "own", **chain.end}])
    store.close()
    problems = Ledger.open(url).verify()
    assert [problem for problem in problems if "does not cover its event" in problem] == problems
    assert bool(problems) == is_seen


@pytest.mark.parametrize(
    ("version", "change", "is_same"),
    [
        (accountant_version(), 5e-10, True),
        (accountant_version(), 2e-9, False),
        ("1", 0.019, True),
        ("1", 0.021, False),
        (accountant_version(), -2e-9, False),
        ("1", -0.5, True),  # a later version finds less
    ],
)
def test_a_charge_that_another_machine_or_version_priced_is_the_same(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, version: str, change: float, is_same: bool
):
    price = accountant.cost(TENTH, 0.0).epsilon

    def charged(epsilon: float) -> Entry:
        return reserve(ledger, "run-5", asked=Budget(epsilon, 0.0))

    monkeypatch.setattr("dpray.ledger.transaction.accountant_version", lambda: version)
    entry = charged(price * (1 + max(0.0, -change)))
    monkeypatch.undo()
    asked = price * (1 + max(0.0, change))
    if is_same:
        assert charged(asked) == entry
    else:
        with pytest.raises(LedgerConflict, match="reserved for another charge"):
            charged(asked)


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM dpray_secret",
        "UPDATE dpray_secret SET data_key = 'no key'",
        "UPDATE dpray_secret SET data_key = ''",
        "INSERT INTO dpray_secret VALUES ('00')",
    ],
)
def test_verify_sees_that_the_ledger_has_lost_its_key(
    ledger: Ledger, edit: Callable[[str], None], statement: str
):
    """Without it, files that were charged under another name are not recognised."""
    edit(statement)
    assert [problem for problem in ledger.verify() if "lost its key" in problem]
    with pytest.raises(LedgerError, match="lost its key"):
        reserve(ledger, "run-3", files=[b"digest of a file"])


@pytest.mark.parametrize("payload", ["[]", "5", "null", '"a"'])
def test_a_create_entry_that_is_no_object_is_a_problem(
    ledger: Ledger, edit: Callable[[str], None], payload: str
):
    edit(f"UPDATE dpray_entries SET payload = '{payload}' WHERE seq = 0")
    assert any("its charges cannot be read" in problem for problem in ledger.verify())


@pytest.mark.parametrize("column", ["entries SET seq", "datasets SET length"])
def test_a_text_in_a_column_of_numbers_is_a_problem(tmp_path: Path, column: str):
    """SQLite keeps it."""
    url = f"sqlite:///{tmp_path}/ledger.db"
    Ledger.create_or_open(url).create_dataset("notes", BUDGET, *STATED_FOR)
    engine = sa.create_engine(parse_url(url), poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE dpray_{column} = 'one'")
    assert Ledger.open(url).verify()
    with pytest.raises(LedgerError):
        reserve(Ledger.open(url), "run-1")


def test_a_replay_gives_the_same_bits(url: str):
    for composition in ("basic", "renyi"):
        ledger = Ledger.create_or_open(url)
        ledger.create_dataset(composition, Budget(30.0, 1e-5), *STATED_FOR, composition)
        for run in range(1, 20):
            asked = Budget(3 / (2 * run + 1) + 1 / 3, 1e-7 / run)
            event = Gaussian(20.0 + 7.3 * run)
            ledger.reserve(composition, {f"{composition}-{run}": (event, asked)}, *STATED_FOR)
        live = ledger.account(composition)
        reopened = Ledger.open(url).account(composition)
        exported = [json.loads(json.dumps(row)) for row in ledger.export()]
        replayed = Account.replay(
            Entry(**row | {"payload": canonical_json(row["payload"])})
            for row in exported
            if row["dataset"] == composition
        )
        bits = [value.hex() for value in (live.spent.epsilon, live.spent.delta)]
        for again in (reopened, replayed):
            assert [value.hex() for value in (again.spent.epsilon, again.spent.delta)] == bits
        events = {charge.event for charge in live.charges}
        assert events == {event_from_json(charge.event.to_json()) for charge in replayed.charges}


def test_a_ledger_deleted_meanwhile_is_refused_not_made_anew(tmp_path: Path):
    path = tmp_path / "ledger.db"
    ledger = Ledger.create_or_open(f"sqlite:///{path}")
    ledger.create_dataset("notes", BUDGET, *STATED_FOR)
    for file in tmp_path.iterdir():
        file.unlink()
    for act in (lambda: reserve(ledger, "run"), ledger.verify, lambda: Ledger.open(str(ledger))):
        with pytest.raises(InputError, match="there is no ledger"):
            act()
    assert not path.exists()


def test_a_file_that_is_no_database_is_one_clear_line(tmp_path: Path):
    path = tmp_path / "ledger.db"
    path.write_bytes(b"not a database at all" * 500)
    for opens in (Ledger.open, Ledger.create_or_open):
        with pytest.raises(InputError, match="not a database") as failed:
            opens(f"sqlite:///{path}")
        assert "\n" not in str(failed.value)


def test_a_locked_ledger_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dpray.ledger.store.SECONDS_TO_WAIT", 0.1)
    url = f"sqlite:///{tmp_path}/ledger.db"
    ledger = Ledger.create_or_open(url)
    ledger.create_dataset("notes", BUDGET, *STATED_FOR)
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        with pytest.raises(LedgerError, match="locked") as failed:
            reserve(ledger, "run")
    assert "\n" not in str(failed.value)
    assert failed.value.exit_code == 1
    assert ledger.account("notes").charges == ()


def test_a_write_waits_for_the_disk(ledger: Ledger, url: str):
    """The tests' PostgreSQL is set not to wait; the ledger turns it on for itself."""
    seen = []
    question, answer = "SHOW synchronous_commit", "on"
    if url.startswith("sqlite"):
        question, answer = "PRAGMA synchronous", 2  # FULL
    with listener("commit", lambda c: seen.append(c.exec_driver_sql(question).scalar())):
        reserve(ledger, "run-3")
    assert seen[-1] == answer


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file of this process can grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("kibibytes", [0, 16, 48])
def test_a_full_disk_never_undercounts(tmp_path: Path, kibibytes: int):
    """Wherever the disk gets full, in the log or when the log is written back: an answered
    reservation is there afterwards, and the ledger goes on once there is room."""
    path = tmp_path / "ledger.db"
    ledger = Ledger.create_or_open(f"sqlite:///{path}")
    ledger.create_dataset("notes", Budget(100.0, 1e-4), *STATED_FOR)
    answered: list[str] = []

    def fill() -> None:
        for run in range(1000):
            reserve(ledger, f"run-{run}")
            answered.append(f"run-{run}")

    with full_disk(kibibytes * 1024), pytest.raises(LedgerError) as failed:
        fill()
    assert "\n" not in str(failed.value)
    kept = [row["key"] for row in ledger.export() if row["kind"] == "reserve"]
    assert kept[: len(answered)] == answered
    assert ledger.verify() == []
    for run in range(len(kept) + 3):
        reserve(ledger, f"run-{run}")
    account = ledger.account("notes")
    assert len(account.charges) == len(kept) + 3
