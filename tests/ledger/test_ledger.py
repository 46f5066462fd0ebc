"""What the ledger's operations answer, on SQLite and on PostgreSQL alike."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa

from dpray.accounting.accountant import cost, rdp_to_epsilon
from dpray.accounting.composition import RenyiComposition
from dpray.accounting.event import NEIGHBORING_RELATION
from dpray.accounting.events import DiscreteLaplace, Gaussian
from dpray.ledger.account import Account, check_price
from dpray.ledger.chain import Entry
from dpray.ledger.ledger import Ledger
from dpray.types import Budget, BudgetRefused, InputError, LedgerConflict, LedgerError
from tests.ledger.charges import ASKED, SHA, STATED_FOR, TENTH, publish, reserve


def test_a_missing_ledger_is_refused(url: str, tmp_path: Path):
    with pytest.raises(InputError, match="there is no ledger"):
        Ledger.open(url)
    assert not (tmp_path / "ledger.db").exists()
    (tmp_path / "empty.db").touch()
    with pytest.raises(InputError, match="there is no ledger"):
        Ledger.open(f"sqlite:///{tmp_path}/empty.db")


@pytest.mark.parametrize(
    "url", ["ledger.db", "sqlite://", "sqlite:///:memory:", "mysql://host/name", "postgres://h/n"]
)
def test_an_url_that_is_no_ledger_is_bad_input(url: str):
    with pytest.raises(InputError):
        Ledger.create_or_open(url)


def test_ten_tenths_fill_a_budget_of_one(ledger: Ledger):
    for run in range(10):
        reserve(ledger, f"run-{run}")
    with pytest.raises(BudgetRefused) as refused:
        reserve(ledger, "run-10")
    assert refused.value.asked == ASKED
    assert refused.value.spent == Budget(1.0, 1e-6)
    assert refused.value.left == Budget(0.0, 0.0)
    assert len(ledger.show()["datasets"][0]["entries"]) == 10


def test_a_budget_that_is_the_plans_own_cost_holds_it_once(url: str):
    event = Gaussian(1.37)
    own = Budget(cost(event, 1e-6).epsilon, 1e-6)
    ledger = Ledger.create_or_open(url)
    ledger.create_dataset("own", own, *STATED_FOR)
    ledger.reserve("own", {"first": (event, own)}, *STATED_FOR)
    assert ledger.account("own").spent == own
    with pytest.raises(BudgetRefused):
        ledger.reserve("own", {"second": (DiscreteLaplace(1e9, 1), Budget(1e-9, 0.0))}, *STATED_FOR)


def test_several_charges_are_made_together_or_not_at_all(ledger: Ledger):
    charges = {f"run/{part}": (TENTH, Budget(0.6, 0.0)) for part in ("a", "b")}
    with pytest.raises(BudgetRefused):
        ledger.reserve("notes", charges, *STATED_FOR)
    assert not ledger.is_reserved("run/a") and ledger.account("notes").charges == ()
    fitting = {key: (TENTH, Budget(0.5, 0.0)) for key in charges}
    made = ledger.reserve("notes", fitting, *STATED_FOR)
    assert ledger.reserve("notes", fitting, *STATED_FOR) == made
    assert ledger.account("notes").spent.epsilon == 1.0
    # What is there already is charged once; a key stands for one charge.
    with pytest.raises(LedgerConflict):
        ledger.reserve("notes", charges, *STATED_FOR)


def test_delta_alone_can_refuse(ledger: Ledger):
    with pytest.raises(BudgetRefused, match="delta 2e-06"):
        reserve(ledger, "run", asked=Budget(0.1, 2e-6))


def test_a_renyi_budget_adds_divergences_at_its_order(url: str):
    ledger = Ledger.create_or_open(url)
    budget = Budget(3.0, 1e-6)
    ledger.create_dataset("notes", budget, *STATED_FOR, composition="renyi")
    account = ledger.account("notes")
    assert isinstance(account.composition, RenyiComposition)
    event = Gaussian(10.0)
    asked = Budget(cost(event, 1e-6).epsilon, 1e-6)
    keys = (f"run-{n}" for n in range(1000))
    held = 0

    def fill() -> None:
        nonlocal held
        for key in keys:
            ledger.reserve("notes", {key: (event, asked)}, *STATED_FOR)
            held += 1

    with pytest.raises(BudgetRefused, match="renyi at order"):
        fill()
    order = account.composition.order
    divergence = order / (2 * 10.0**2)
    assert rdp_to_epsilon(held * divergence, order, 1e-6) <= 3.0
    assert rdp_to_epsilon((held + 1) * divergence, order, 1e-6) > 3.0
    assert held > budget.epsilon // asked.epsilon, "a filter holds more runs than plain sums"
    assert ledger.verify() == []


def test_the_same_reservation_again_is_the_same_answer(ledger: Ledger, url: str):
    first = reserve(ledger, "run")
    assert reserve(ledger, "run") == first
    assert reserve(Ledger.open(url), "run") == first
    assert ledger.account("notes").spent == ASKED


def test_a_key_with_another_charge_is_a_conflict(ledger: Ledger):
    reserve(ledger, "run")
    ledger.create_dataset("other", Budget(1.0, 1e-6), *STATED_FOR)
    with pytest.raises(LedgerConflict):
        reserve(ledger, "run", asked=Budget(0.2, 1e-7))
    with pytest.raises(LedgerConflict):
        reserve(ledger, "run", dataset="other")
    with pytest.raises(LedgerConflict):
        ledger.reserve("notes", {"run": (DiscreteLaplace(11.0, 1), ASKED)}, *STATED_FOR)
    assert len(list(ledger.export())) == 3


def test_a_dataset_has_one_budget(ledger: Ledger):
    ledger.create_dataset("notes", Budget(1.0, 1e-6), *STATED_FOR)
    for other in (
        (Budget(2.0, 1e-6), *STATED_FOR),
        (Budget(1.0, 1e-6), "patient", NEIGHBORING_RELATION),
        (Budget(1.0, 1e-6), *STATED_FOR, "renyi"),
    ):
        with pytest.raises(InputError, match="has another budget"):
            ledger.create_dataset("notes", *other)
    assert len(list(ledger.export())) == 1


@pytest.mark.parametrize(
    "stated_for", [("patient", NEIGHBORING_RELATION), ("record", "replace_one")]
)
def test_events_for_another_unit_or_relation_do_not_compose(ledger: Ledger, stated_for):
    with pytest.raises(InputError, match="do not compose"):
        ledger.reserve("notes", {"run": (TENTH, ASKED)}, *stated_for)


def test_a_charge_below_its_events_cost_is_refused(ledger: Ledger):
    with pytest.raises(InputError, match="does not cover"):
        reserve(ledger, "run", asked=Budget(0.05, 1e-9))
    assert len(list(ledger.export())) == 1


@pytest.mark.parametrize(
    "budget",
    [Budget(float("nan"), 1e-6), Budget(float("inf"), 1e-6), Budget(-1, 1e-6), Budget(1, -1e-6),
     Budget(1, 1.0), Budget(1, float("nan"))],
    ids=str,
)  # fmt: skip
def test_numbers_that_are_no_budget(ledger: Ledger, budget: Budget):
    with pytest.raises(InputError):
        ledger.create_dataset("other", budget, *STATED_FOR)
    with pytest.raises(InputError):
        reserve(ledger, "run", asked=budget)


def test_an_unknown_dataset(ledger: Ledger):
    assert ledger.account("unknown") is None
    with pytest.raises(InputError, match="no data set 'unknown'"):
        reserve(ledger, "run", dataset="unknown")


def test_a_trial_charges_nothing(ledger: Ledger):
    reserve(ledger, "run")
    before = list(ledger.export())

    def try_to(epsilon: float, dataset: str = "notes") -> list[Entry]:
        charge = {"trial": (DiscreteLaplace(1 / epsilon, 1), Budget(epsilon, 0.0))}
        return ledger.reserve(dataset, charge, *STATED_FOR, is_trial=True)

    assert try_to(0.9) == []
    with pytest.raises(BudgetRefused, match="'notes' refused"):
        try_to(1.0)
    with pytest.raises(InputError, match="no data set 'unknown'; it has 'notes'"):
        try_to(0.1, "unknown")
    assert list(ledger.export()) == before


def test_a_child_of_version_0_1_is_refused(ledger: Ledger):
    """Its charges were drawn on its parent too."""
    [create] = ledger.export()
    payload = create["payload"] | {"parent": None}
    assert Account.replay([Entry(**create | {"payload": json.dumps(payload)})]).charges == ()
    payload["parent"] = "hospital"
    with pytest.raises(LedgerError, match="'notes' is a child of 'hospital'"):
        Account.replay([Entry(**create | {"payload": json.dumps(payload)})])


@pytest.mark.parametrize("text", ["", "x" * 201, "a\nb", "a\x00b", "a\tb", "KeyError: 'said'\n"])
def test_what_cannot_be_a_public_name_is_kept_out(ledger: Ledger, text: str):
    reserve(ledger, "run")
    for act in (
        lambda: ledger.begin("run", "attempt-1", [text]),
        lambda: ledger.begin("run", text, ["a/0"]),
        lambda: publish(ledger, text),
        lambda: publish(ledger, "a/0", "attempt-1", text),
        lambda: ledger.fail("run", "a/0", "attempt-1", text),
        lambda: reserve(ledger, text),
        lambda: ledger.create_dataset(text, ASKED, *STATED_FOR),
        lambda: ledger.create_dataset("other", ASKED, text, NEIGHBORING_RELATION),
    ):
        with pytest.raises(InputError) as refused:
            act()
        assert not text or text not in str(refused.value)


def test_reserve_and_publish_do_not_grow_with_the_batches(tmp_path: Path):
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    def watch(connection, _record) -> None:
        connection.set_progress_handler(count, 1)

    def work(ledger: Ledger, name: str) -> int:
        nonlocal steps
        steps = 0
        reserve(ledger, name)
        ledger.begin("run", name, [name])
        publish(ledger, name, name)
        return steps

    sa.event.listen(sa.pool.Pool, "connect", watch)
    try:
        ledger = Ledger.create_or_open(f"sqlite:///{tmp_path}/ledger.db")
        ledger.create_dataset("notes", Budget(1.0, 1e-6), *STATED_FOR)
        reserve(ledger, "run")
        few = work(ledger, "few")
        units = [f"label/{n}" for n in range(1500)]
        ledger.begin("run", "attempt-1", units)
        ledger.publish("run", "attempt-1", ((unit, SHA) for unit in units))
        many = work(ledger, "many")
    finally:
        sa.event.remove(sa.pool.Pool, "connect", watch)
    assert few > 0
    assert many <= 2 * few, f"{few} and {many} steps of SQLite's machine"


def test_the_password_is_not_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dpray.ledger.store.SECONDS_TO_WAIT", 1)
    with pytest.raises(Exception) as failed:
        Ledger.open("postgresql://somebody:hunter2@127.0.0.1:1/ledger")
    assert "hunter2" not in str(failed.value)
    assert "\n" not in str(failed.value)


def test_a_relative_path_stays_where_it_was_opened(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ledger = Ledger.create_or_open("sqlite:///ledger.db")
    os.chdir("/")
    ledger.create_dataset("notes", ASKED, *STATED_FOR)
    assert (tmp_path / "ledger.db").exists()


def test_threads_that_ask_for_one_price_at_a_time_compute_it_once():
    """As an accountant's threads do when hundreds of equal runs reserve together."""
    computed: list[float] = []
    gate = threading.Barrier(8)

    class Slow(DiscreteLaplace):
        def pure_epsilon(self) -> float:
            computed.append(time.monotonic())
            time.sleep(0.2)
            return super().pure_epsilon()

    def ask(event: DiscreteLaplace) -> None:
        gate.wait(60)
        check_price(event, ASKED)

    event = Slow(10.0, 1)
    check_price(Slow(20.0, 1), ASKED)
    alone = len(computed)
    computed.clear()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, [event] * 8))
    assert len(computed) == alone
