"""A budget is raised on record: upwards only, with a reason, and no charge is forgotten."""

from __future__ import annotations

import json
import shlex

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from dpray.accounting.composition import BasicComposition, Charge, RenyiComposition
from dpray.accounting.event import Event
from dpray.accounting.events import DiscreteLaplace, Gaussian
from dpray.cli import run_command
from dpray.ledger import queries
from dpray.ledger.chain import Chain
from dpray.ledger.ledger import Ledger
from dpray.ledger.store import Store
from dpray.types import Budget, BudgetRefused, InputError, LedgerError
from tests.ledger.charges import BUDGET, STATED_FOR

REASON = "the second half of the year"


def charge(epsilon: float) -> tuple[Event, Budget]:
    """Return an event that costs a little less than `epsilon`, and its budget without a delta."""
    return DiscreteLaplace(1.000001 / epsilon, 1), Budget(epsilon, 0.0)


def test_a_raise_admits_what_was_refused(ledger: Ledger, url: str) -> None:
    event, cost = charge(BUDGET.epsilon)
    ledger.reserve("notes", {"run-1": (event, cost)}, *STATED_FOR)
    with pytest.raises(BudgetRefused) as refused:
        ledger.reserve("notes", {"run-2": (event, cost)}, *STATED_FOR)
    needed = refused.value.needed
    assert needed is not None and f"--ledger {shlex.quote(str(ledger))} --dataset notes " in str(
        refused.value
    )
    account = ledger.raise_budget("notes", REASON, epsilon=needed.epsilon, delta=needed.delta)
    assert account.budget == needed
    ledger.reserve("notes", {"run-2": (event, cost)}, *STATED_FOR)
    # Another process reads the same account.
    other = Ledger.open(url)
    again = other.account("NOTES")
    assert again is not None and again.budget == needed and len(again.charges) == 2
    assert other.verify() == []
    [shown] = other.show()["datasets"]
    assert shown["created_with"] == vars(BUDGET) and shown["budget"] == vars(needed)
    assert [(each["budget"], each["reason"]) for each in shown["raises"]] == [
        (vars(needed), REASON)
    ]
    assert [row["kind"] for row in other.export()] == ["create", "reserve", "raise", "reserve"]


def test_the_same_raise_twice_is_one(ledger: Ledger) -> None:
    """So a transaction whose connection was lost may be repeated."""
    for _ in range(2):
        ledger.raise_budget("notes", REASON, epsilon=BUDGET.epsilon + 1)
    with pytest.raises(InputError, match="is only raised"):
        ledger.raise_budget("notes", "another reason", epsilon=BUDGET.epsilon + 1)
    assert [row["kind"] for row in ledger.export()] == ["create", "raise"]


@pytest.mark.parametrize(
    ("epsilon", "delta"),
    [
        (BUDGET.epsilon - 1e-9, None), (None, BUDGET.delta / 2), (BUDGET.epsilon + 1, 0.0),
        (BUDGET.epsilon, BUDGET.delta), (float("nan"), None), (float("inf"), None), (-1.0, None),
        (None, 1.0), (None, float("nan")),
    ],
)  # fmt: skip
def test_a_budget_only_rises(ledger: Ledger, epsilon: float | None, delta: float | None) -> None:
    with pytest.raises(InputError, match="'notes'"):
        ledger.raise_budget("notes", REASON, epsilon=epsilon, delta=delta)
    assert ledger.verify() == [] and len(list(ledger.export())) == 1


@pytest.mark.parametrize("reason", ["", "  ", "two\nlines", "x" * 1001, "a\x00b"])
def test_a_raise_has_a_reason(ledger: Ledger, reason: str) -> None:
    with pytest.raises(InputError, match="a reason has to have"):
        ledger.raise_budget("notes", reason, epsilon=BUDGET.epsilon + 1)


def test_a_data_set_that_is_not_there_is_not_raised(ledger: Ledger) -> None:
    with pytest.raises(InputError, match="no data set 'nots'"):
        ledger.raise_budget("nots", REASON, epsilon=9.0)


def test_a_renyi_budget_keeps_its_order_and_its_charges(url: str) -> None:
    ledger = Ledger.create_or_open(url)
    ledger.create_dataset("votes", Budget(1.0, 1e-6), *STATED_FOR, composition="renyi")
    before = ledger.account("votes")
    assert before is not None
    event, cost = Gaussian(8.0), Budget(1.0, 1e-6)
    number = 0
    while not (account := ledger.account("votes")) or account.spent.epsilon < 0.8:
        ledger.reserve("votes", {f"run-{number}": (event, cost)}, *STATED_FOR)
        number += 1
    with pytest.raises(BudgetRefused) as refused:
        ledger.reserve("votes", {"large": (Gaussian(2.0), Budget(3.0, 1e-6))}, *STATED_FOR)
    needed = refused.value.needed
    assert number > 0
    assert needed is not None
    assert needed.delta == 1e-6
    raised = ledger.raise_budget("votes", REASON, epsilon=needed.epsilon)
    assert isinstance(raised.composition, RenyiComposition)
    assert isinstance(before.composition, RenyiComposition)
    assert raised.composition.order == before.composition.order
    ledger.reserve("votes", {"large": (Gaussian(2.0), Budget(3.0, 1e-6))}, *STATED_FOR)
    after = ledger.account("votes")
    assert after is not None and len(after.charges) == number + 1 and ledger.verify() == []
    with pytest.raises(BudgetRefused):
        ledger.reserve("votes", {"more": (event, cost)}, *STATED_FOR)


def test_creating_again_with_the_first_budget_is_no_error(ledger: Ledger) -> None:
    """A job's script creates first, each time; a raise does not break it."""
    ledger.raise_budget("notes", REASON, epsilon=BUDGET.epsilon + 1)
    ledger.create_dataset("notes", BUDGET, *STATED_FOR)
    ledger.create_dataset("notes", Budget(BUDGET.epsilon + 1, BUDGET.delta), *STATED_FOR)
    with pytest.raises(InputError, match="`dpray ledger raise` makes it larger"):
        ledger.create_dataset("notes", Budget(BUDGET.epsilon + 2, BUDGET.delta), *STATED_FOR)


def test_the_command(ledger: Ledger, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--ledger", url, "--dataset", "notes"]
    more = ["--epsilon", str(BUDGET.epsilon + 1), "--reason", REASON]
    assert run_command(["ledger", "raise", *place, *more, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["budget"]["epsilon"] == BUDGET.epsilon + 1
    assert run_command(["ledger", "show", "--ledger", url]) == 0
    assert REASON in capsys.readouterr().out
    assert run_command(["ledger", "raise", *place, "--reason", REASON]) == 2
    assert run_command(["ledger", "verify", "--ledger", url]) == 0


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE dpray_entries SET payload = replace(payload, '9.0', '8.5') WHERE kind = 'raise'",
        "DELETE FROM dpray_entries WHERE kind = 'raise'",
        "UPDATE dpray_entries SET kind = 'fail' WHERE kind = 'raise'",
    ],
)
def test_an_altered_raise_is_found_and_nothing_is_charged(
    ledger: Ledger, url: str, statement: str
) -> None:
    ledger.raise_budget("notes", REASON, epsilon=9.0)
    event, cost = charge(0.5)
    ledger.reserve("notes", {"run-1": (event, cost)}, *STATED_FOR)
    store = Store(url, create=False)
    with store.begin() as connection:
        connection.execute(sa.text(statement))
    store.close()
    other = Ledger.open(url)
    assert other.verify()
    with pytest.raises(LedgerError):
        other.reserve("notes", {"run-2": (event, cost)}, *STATED_FOR)


def test_a_charge_above_the_budget_of_its_time_is_found(ledger: Ledger, url: str) -> None:
    """A later raise does not cover it up: here a whole chain was written by hand."""
    event, cost = charge(BUDGET.epsilon + 1)
    [created] = ledger.export()
    chain = Chain("notes", 1, created["hash"])
    payload = {
        "event": event.to_json(), **vars(cost), "privacy_unit": STATED_FOR[0],
        "neighboring_relation": STATED_FOR[1],
    }  # fmt: skip
    chain.append("reserve", "run-1", payload)
    larger = {"budget": vars(Budget(BUDGET.epsilon + 2, BUDGET.delta)), "reason": REASON}
    chain.append("raise", "notes", larger, unit="0")
    store = Store(url, create=False)
    with store.begin() as connection:
        connection.execute(queries.INSERT, [vars(entry) for entry in chain.added])
        connection.execute(queries.SET_END, [{"own": "notes", **chain.end}])
    store.close()
    [problem] = Ledger.open(url).verify()
    assert "spent" in problem


AMOUNTS = st.floats(0.01, 1e3)
DELTAS = st.sampled_from([0.0, 1e-9, 1e-6, 1e-4, 0.3])


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.booleans(), AMOUNTS, DELTAS), max_size=6))
def test_any_series_of_raises_and_charges_verifies(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[bool, float, float]]
) -> None:
    url = f"sqlite:///{tmp_path_factory.mktemp('raise')}/ledger.db"
    ledger, budget = Ledger.create_or_open(url), Budget(1.0, 1e-6)
    ledger.create_dataset("notes", budget, *STATED_FOR)
    spent = [0.0]
    for number, (raises, epsilon, delta) in enumerate(steps):
        if raises:
            larger = Budget(budget.epsilon + epsilon, max(budget.delta, delta))
            ledger.raise_budget("notes", REASON, epsilon=larger.epsilon, delta=larger.delta)
            budget = larger
            continue
        event, cost = charge(epsilon)
        try:
            ledger.reserve("notes", {f"run-{number}": (event, cost)}, *STATED_FOR)
            spent.append(epsilon)
        except BudgetRefused as refused:
            needed = refused.needed
            assert needed is not None and needed.epsilon >= max(sum(spent) + epsilon, 0) * (
                1 - 1e-9
            )
            assert needed.epsilon >= budget.epsilon and needed.delta >= budget.delta
    account = Ledger.open(url).account("notes")
    assert account is not None and account.budget == budget
    assert account.spent.epsilon == pytest.approx(sum(spent)) and ledger.verify() == []


@given(AMOUNTS, DELTAS, AMOUNTS, DELTAS)
def test_the_budget_that_a_refusal_names_holds_the_charge(
    epsilon: float, delta: float, asked: float, asked_delta: float
) -> None:
    rule = BasicComposition(Budget(epsilon, delta))
    event, _ = charge(asked)
    total = rule.total([Charge(event, Budget(asked, asked_delta))] * 2)
    needed = rule.needed(total)
    assert (needed is None) == (2 * asked_delta >= 1)
    if needed is not None:
        assert not BasicComposition(needed).is_exceeded(total)
        assert needed.epsilon >= epsilon and needed.delta >= delta
