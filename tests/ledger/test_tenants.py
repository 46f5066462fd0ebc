"""Budgets that are shared out to tenants, and data sets that draw on their parents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from dpray.accounting.accountant import cost
from dpray.accounting.composition import Charge, RenyiComposition, default_order
from dpray.accounting.event import NEIGHBORING_RELATION, canonical_json
from dpray.accounting.events import Gaussian, Laplace
from dpray.ledger.chain import Entry
from dpray.ledger.errors import LedgerConflict, LedgerError
from dpray.ledger.ledger import Ledger
from dpray.ledger.url import parse_url
from dpray.types import Budget, BudgetRefused, InputError

STATED_FOR = ("record", NEIGHBORING_RELATION)
ONE = Budget(1.0, 1e-6)
HALF = Budget(0.5, 5e-7)


def reserve(
    ledger: Ledger, key: str, dataset: str, epsilon: float = 0.25, tenant: str | None = None
) -> None:
    charge = {key: (Laplace(1 / epsilon), Budget(epsilon, 1e-8))}
    ledger.reserve(dataset, charge, *STATED_FOR, tenant=tenant)


def spent(ledger: Ledger, dataset: str) -> float:
    account = ledger.account(dataset)
    assert account is not None
    return account.spent.epsilon


@pytest.fixture
def ledger(url: str) -> Ledger:
    """Two data sets, one below the other, and one of their own; the parent has two tenants."""
    ledger = Ledger.create_or_open(url)
    ledger.create_dataset("hospital", ONE, *STATED_FOR)
    ledger.create_dataset("clinic", ONE, *STATED_FOR, parent=" Hospital")
    ledger.create_dataset("ward", ONE, *STATED_FOR, parent="clinic")
    ledger.create_dataset("shared", ONE, *STATED_FOR)
    for tenant in ("red", "blue"):
        ledger.create_tenant("shared", tenant, Budget(0.75, 1e-6))
    return ledger


@pytest.fixture
def edit(url: str, ledger: Ledger) -> Iterator[Callable[..., None]]:
    """Run statements behind the ledger's back."""
    engine = sa.create_engine(parse_url(url), poolclass=sa.NullPool)

    def run(*statements: str) -> None:
        with engine.begin() as connection:
            for statement in statements:
                assert connection.exec_driver_sql(statement).rowcount > 0

    yield run
    engine.dispose()


# Tenants


def test_a_tenant_gets_no_more_than_its_cap_and_all_no_more_than_the_budget(ledger: Ledger):
    reserve(ledger, "red-1", "shared", 0.5, "red")
    reserve(ledger, "red-2", "shared", 0.25, "red")
    with pytest.raises(BudgetRefused, match="the tenant 'red' has") as refused:
        reserve(ledger, "red-3", "shared", 1e-6, "red")
    assert refused.value.dataset == "shared" and refused.value.left.epsilon == 0.0
    # Their own cap would hold this one: the data set's budget does not.
    with pytest.raises(BudgetRefused) as refused:
        reserve(ledger, "blue-1", "shared", 0.5, "blue")
    assert "tenant" not in str(refused.value) and refused.value.left.epsilon == 0.25
    reserve(ledger, "blue-2", "shared", 0.25, "blue")
    assert spent(ledger, "shared") == 1.0
    account = ledger.account("shared")
    assert [account.share(tenant).spent.epsilon for tenant in ("red", "blue")] == [0.75, 0.25]
    assert len(list(ledger.export())) == 9, "a refusal charges nothing"
    assert ledger.verify() == []


def test_the_same_run_of_another_tenant_is_another_charge(ledger: Ledger):
    reserve(ledger, "run", "shared", tenant="red")
    reserve(ledger, "run", "shared", tenant="red")
    for other in ("blue", None):
        with pytest.raises(LedgerConflict):
            reserve(ledger, "run", "shared", tenant=other)
    assert spent(ledger, "shared") == 0.25


@pytest.mark.parametrize(
    ("dataset", "tenant", "says"),
    [
        ("shared", None, r"has to name one of its tenants \(red, blue\), and it has none"),
        ("shared", "green", "'green' is not one of them"),
        ("shared", "Red", "'Red' is not one of them"),
        ("hospital", "red", "'hospital' has no tenants"),
    ],
)
def test_a_run_names_a_tenant_where_there_are_tenants(
    ledger: Ledger, dataset: str, tenant: str | None, says: str
):
    with pytest.raises(InputError, match=says):
        reserve(ledger, "run", dataset, tenant=tenant)
    assert spent(ledger, dataset) == 0.0


def test_a_budget_can_be_shared_out_after_its_first_runs(ledger: Ledger):
    reserve(ledger, "early", "hospital", 0.5)
    ledger.create_tenant("hospital", "red", ONE)
    with pytest.raises(BudgetRefused):
        reserve(ledger, "late", "hospital", 0.75, "red")
    reserve(ledger, "late", "hospital", 0.5, "red")
    reserve(ledger, "early", "hospital", 0.5)
    assert ledger.account("hospital").share("red").spent.epsilon == 0.5
    assert ledger.verify() == []


def test_a_tenant_has_one_cap_within_the_budget(ledger: Ledger):
    ledger.create_tenant("Shared", " red ", Budget(0.75, 1e-6))
    for budget in (Budget(0.5, 1e-6), Budget(0.75, 1e-7)):
        with pytest.raises(InputError, match="has another budget"):
            ledger.create_tenant("shared", "red", budget)
    with pytest.raises(InputError, match="in another spelling"):
        ledger.create_tenant("shared", "RED", HALF)
    for budget in (Budget(1.1, 1e-6), Budget(1.0, 1e-5), Budget(float("nan"), 1e-6)):
        with pytest.raises(InputError, match="is more than the budget"):
            ledger.create_tenant("shared", "green", budget)
    for name in ("", " ", "a/b", "grün", "x" * 201):
        with pytest.raises(InputError, match="name of a tenant"):
            ledger.create_tenant("shared", name, HALF)
    with pytest.raises(InputError, match="no data set 'unknown'"):
        ledger.create_tenant("unknown", "red", HALF)
    assert sorted(ledger.account("shared").tenants) == ["blue", "red"]


def test_a_tenants_charges_add_up_by_the_data_sets_rule_at_an_order_of_their_own(url: str):
    ledger = Ledger.create_or_open(url)
    ledger.create_dataset("notes", Budget(3.0, 1e-6), *STATED_FOR, composition="renyi")
    cap = Budget(1.0, 1e-6)
    ledger.create_tenant("notes", "red", cap)
    ledger.create_tenant("notes", "red", cap)
    rule = ledger.account("notes").share("red").composition
    assert rule == RenyiComposition(cap, default_order(cap))
    event = Gaussian(20.0)
    charge = (event, Budget(cost(event, 1e-6).epsilon, 1e-6))
    held = 0

    def fill() -> None:
        nonlocal held
        for held in range(100):
            ledger.reserve("notes", {f"run-{held}": charge}, *STATED_FOR, tenant="red")

    with pytest.raises(BudgetRefused, match=r"tenant 'red'.*by renyi at order"):
        fill()
    assert held > 1.0 // charge[1].epsilon, "a filter holds more runs than plain sums"
    assert ledger.account("notes").share("red").spent.epsilon <= 1.0
    assert ledger.verify() == []


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM dpray_entries WHERE kind = 'create' AND unit = 'red'",
        "UPDATE dpray_entries SET payload = replace(payload, '0.75', '0.8') WHERE unit = 'red'",
        "UPDATE dpray_entries SET unit = 'green' WHERE unit = 'blue'",
    ],
)
def test_an_edited_tenant_is_seen(
    ledger: Ledger, url: str, edit: Callable[..., None], statement: str
):
    reserve(ledger, "run", "shared", tenant="red")
    edit(statement)
    assert ledger.verify()
    with pytest.raises(LedgerError, match="not as they were written"):
        reserve(Ledger.open(url), "run-2", "shared", tenant="red")


# Parents


def test_a_charge_is_drawn_on_every_ancestor(ledger: Ledger):
    reserve(ledger, "run-1", "ward")
    reserve(ledger, "run-2", "clinic")
    reserve(ledger, "run-3", "hospital")
    reserve(ledger, "run-1", "ward")
    assert [spent(ledger, name) for name in ("ward", "clinic", "hospital")] == [0.25, 0.5, 0.75]
    with pytest.raises(BudgetRefused, match=r"'hospital' refused.*'ward' draws on it"):
        reserve(ledger, "run-4", "ward", 0.5)
    assert [spent(ledger, name) for name in ("ward", "clinic", "hospital")] == [0.25, 0.5, 0.75]
    ledger.begin("run-1", "attempt-1", ["a/0"])
    assert ledger.publish("run-1", "attempt-1", [("a/0", "a" * 64)]) == 1
    assert ledger.commit("run-1")
    kinds = {row["dataset"]: [] for row in ledger.export()}
    for row in ledger.export():
        kinds[row["dataset"]].append(row["kind"])
    assert kinds["clinic"] == ["create", "reserve", "reserve"], "batches are the child's alone"
    assert ledger.verify() == []


def test_a_charge_is_weighed_by_each_data_sets_own_rule(url: str):
    """The child's filter holds it, the parent's plain sums do not."""
    ledger = Ledger.create_or_open(url)
    ledger.create_dataset("parent", Budget(1.0, 1e-5), *STATED_FOR)
    ledger.create_dataset("child", Budget(1.0, 1e-5), *STATED_FOR, "renyi", parent="parent")
    charge = (Gaussian(20.0), Budget(0.4, 1e-6))
    for run in ("run-1", "run-2"):
        ledger.reserve("child", {run: charge}, *STATED_FOR)
    assert spent(ledger, "parent") == 0.8 > spent(ledger, "child")
    with pytest.raises(BudgetRefused) as refused:
        ledger.reserve("child", {"run-3": charge}, *STATED_FOR)
    assert refused.value.dataset == "parent"
    assert ledger.verify() == []


def test_a_tenant_of_the_parent_is_asked_for_on_the_child(ledger: Ledger):
    ledger.create_dataset("part", ONE, *STATED_FOR, parent="shared")
    with pytest.raises(InputError, match="'shared' has to name one of its tenants"):
        reserve(ledger, "run-1", "part")
    reserve(ledger, "run-1", "part", 0.5, "red")
    with pytest.raises(BudgetRefused, match=r"'part' draws on it.*the tenant 'red' has"):
        reserve(ledger, "run-2", "part", 0.5, "red")
    reserve(ledger, "run-2", "shared", 0.25, "red")
    assert ledger.account("shared").share("red").left.epsilon == 0.0
    assert ledger.verify() == []


def test_a_check_looks_at_the_ancestors_and_charges_nothing(ledger: Ledger):
    fits, beyond = (Charge(Laplace(1 / e), Budget(e, 0.0)) for e in (1.0, 1.5))
    reserve(ledger, "run", "hospital", 0.25)
    with pytest.raises(BudgetRefused, match="'hospital' refused"):
        ledger.check("ward", fits, *STATED_FOR)
    with pytest.raises(BudgetRefused, match="'ward' refused"):
        ledger.check("ward", beyond, *STATED_FOR)
    with pytest.raises(InputError, match="no data set"):
        ledger.check("unknown", fits, *STATED_FOR)
    assert spent(ledger, "ward") == 0.0


def test_a_parent_is_there_first_and_is_for_the_same_unit(ledger: Ledger):
    with pytest.raises(InputError, match="no data set 'new'"):
        ledger.create_dataset("new", ONE, *STATED_FOR, parent="new")
    for stated_for in (("patient", NEIGHBORING_RELATION), ("record", "replace_one")):
        with pytest.raises(InputError, match="do not compose"):
            ledger.create_dataset("new", ONE, *stated_for, parent="hospital")
    # No cycle: a data set that is there keeps the parent that it has, or has not.
    for name, parent in (("hospital", "ward"), ("hospital", "hospital"), ("ward", None)):
        with pytest.raises(InputError, match="has another budget"):
            ledger.create_dataset(name, ONE, *STATED_FOR, parent=parent)
    ledger.create_dataset("Ward", ONE, *STATED_FOR, parent="CLINIC")
    assert ledger.names() == ["clinic", "hospital", "shared", "ward"]


def test_show_lists_tenants_and_parents(ledger: Ledger):
    reserve(ledger, "run-1", "ward")
    reserve(ledger, "run-2", "shared", tenant="blue")
    shown = {each["dataset"]: each for each in ledger.show()["datasets"]}
    assert [shown[name]["parent"] for name in ("ward", "hospital")] == ["clinic", None]
    assert [each["tenant"] for each in shown["shared"]["tenants"]] == ["blue", "red"]
    assert shown["shared"]["tenants"][0]["left"]["epsilon"] == 0.5
    [drawn], [own] = shown["clinic"]["entries"], shown["ward"]["entries"]
    assert (drawn["key"], drawn["drawn_by"], own["drawn_by"]) == ("run-1", "ward", None)
    assert [each["tenant"] for each in shown["shared"]["entries"]] == ["blue"]


def test_verify_sees_a_reservation_that_was_not_drawn(url: str, ledger: Ledger):
    """Written by somebody who makes the whole chain anew: every hash is right."""
    reserve(ledger, "run", "ward")
    rows = [row for row in ledger.export() if row["dataset"] == "hospital"]
    engine = sa.create_engine(parse_url(url), poolclass=sa.NullPool)
    with engine.begin() as connection:
        own = {"dataset": "hospital"}
        connection.execute(
            sa.text("DELETE FROM dpray_entries WHERE dataset = :dataset AND seq = 1"), own
        )
        connection.execute(
            sa.text(
                "UPDATE dpray_datasets SET length = 1, reservations = 0, head = :head "
                "WHERE name = :dataset"
            ),
            own | {"head": rows[0]["hash"]},
        )
    [problem] = ledger.verify()
    assert "data set 'hospital'" in problem and "'ward' was not drawn on it" in problem
    # And the other way round: a draw whose reservation is gone.
    create = next(row for row in ledger.export() if row["dataset"] == "ward")
    with engine.begin() as connection:
        connection.execute(sa.text("DELETE FROM dpray_entries WHERE dataset = 'ward' AND seq = 1"))
        connection.execute(
            sa.text(
                "UPDATE dpray_datasets SET length = 1, reservations = 0, head = :head "
                "WHERE name = 'ward'"
            ),
            {"head": create["hash"]},
        )
    [problem] = ledger.verify()
    assert "data set 'clinic': 'run' was drawn on it, but reserved on no child" in problem
    engine.dispose()


def test_a_cycle_that_was_written_in_is_seen(url: str, ledger: Ledger):
    """Its hashes are right, so that only the walk itself can tell."""
    rows = {row["dataset"]: row for row in ledger.export()}
    payload = canonical_json(rows["hospital"]["payload"] | {"parent": "ward"})
    entry = Entry(**rows["hospital"] | {"payload": payload, "hash": ""})
    changes = {"payload": payload, "head": entry.digest()}
    engine = sa.create_engine(parse_url(url), poolclass=sa.NullPool)
    with engine.begin() as connection:
        for statement in (
            "UPDATE dpray_entries SET payload = :payload, hash = :head WHERE dataset = 'hospital'",
            "UPDATE dpray_datasets SET head = :head WHERE name = 'hospital'",
        ):
            known = {name: changes[name] for name in changes if f":{name}" in statement}
            connection.execute(sa.text(statement), known)
    engine.dispose()
    assert sum("its own ancestor" in problem for problem in ledger.verify()) == 3
    with pytest.raises(LedgerError, match="not as they were written"):
        reserve(Ledger.open(url), "run", "ward")


@pytest.mark.slow
def test_children_that_race_for_their_parents_last_unit(url: str):
    """Every transaction locks several chains; none waits for another for good, and the sums are
    exact."""
    ledger = Ledger.create_or_open(url)
    ledger.create_dataset("m", Budget(1.0, 1e-6), *STATED_FOR)
    for name in ("a", "b", "y", "z"):
        ledger.create_dataset(name, Budget(1.0, 1e-6), *STATED_FOR, parent="m")
    ledger.create_dataset("c", Budget(1.0, 1e-6), *STATED_FOR, parent="z")
    names = ("a", "b", "c", "m", "y", "z")

    def work(number: int) -> int:
        own, admitted = Ledger.open(url), 0
        for turn in range(10):
            try:
                reserve(own, f"run-{number}-{turn}", names[(number + turn) % 6], 0.04)
                admitted += 1
            except BudgetRefused:
                continue
        own.close()
        return admitted

    with ThreadPoolExecutor(6) as pool:
        admitted = sum(pool.map(work, range(6)))
    assert admitted == 25
    assert spent(ledger, "m") == 1.0
    assert ledger.verify() == []
