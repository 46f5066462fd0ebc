"""Data sets that draw on their parents."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from dpray.accounting.event import NEIGHBORING_RELATION, canonical_json
from dpray.accounting.events import Gaussian, Laplace
from dpray.ledger.chain import Entry
from dpray.ledger.ledger import Ledger
from dpray.ledger.store import parse_url
from dpray.types import Budget, BudgetRefused, InputError, LedgerError

STATED_FOR = ("record", NEIGHBORING_RELATION)
ONE = Budget(1.0, 1e-6)


def reserve(ledger: Ledger, key: str, dataset: str, epsilon: float = 0.25) -> None:
    charge = {key: (Laplace(1 / epsilon), Budget(epsilon, 1e-8))}
    ledger.reserve(dataset, charge, *STATED_FOR)


def spent(ledger: Ledger, dataset: str) -> float:
    account = ledger.account(dataset)
    return account.spent.epsilon


@pytest.fixture
def ledger(url: str) -> Ledger:
    """Three data sets, each below the one before it."""
    ledger = Ledger.create_or_open(url)
    ledger.create_dataset("hospital", ONE, *STATED_FOR)
    ledger.create_dataset("clinic", ONE, *STATED_FOR, parent=" Hospital")
    ledger.create_dataset("ward", ONE, *STATED_FOR, parent="clinic")
    return ledger


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


def test_a_trial_looks_at_the_ancestors_and_charges_nothing(ledger: Ledger):
    def try_to(dataset: str, epsilon: float) -> list[Entry]:
        charge = {"trial": (Laplace(1 / epsilon), Budget(epsilon, 0.0))}
        return ledger.reserve(dataset, charge, *STATED_FOR, is_trial=True)

    reserve(ledger, "run", "hospital", 0.25)
    before = list(ledger.export())
    assert try_to("ward", 0.75) == []
    for epsilon, refuses in ((1.0, "hospital"), (1.5, "ward")):
        with pytest.raises(BudgetRefused, match=f"'{refuses}' refused"):
            try_to("ward", epsilon)
    with pytest.raises(InputError, match="no data set 'unknown'; it has 'clinic', 'hospital'"):
        try_to("unknown", 1.0)
    assert list(ledger.export()) == before


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
    assert ledger.names() == ["clinic", "hospital", "ward"]


def test_show_lists_parents(ledger: Ledger):
    reserve(ledger, "run-1", "ward")
    shown = {each["dataset"]: each for each in ledger.show()["datasets"]}
    assert [shown[name]["parent"] for name in ("ward", "hospital")] == ["clinic", None]
    [drawn], [own] = shown["clinic"]["entries"], shown["ward"]["entries"]
    assert (drawn["key"], drawn["drawn_by"], own["drawn_by"]) == ("run-1", "ward", None)


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
