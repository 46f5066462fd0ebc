"""The ledger as one method of a chained run sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dpray.accounting.event import NEIGHBORING_RELATION
from dpray.accounting.events import Gaussian
from dpray.ledger.ledger import Ledger
from dpray.types import AlreadyPublished, Budget

SHA = "0" * 64


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with closing(Ledger.create_or_open(f"sqlite:///{tmp_path}/ledger.db")) as made:
        made.create_dataset("notes", Budget(9, 1e-3), "record", NEIGHBORING_RELATION)
        charge = {"run": (Gaussian(1.0), Budget(9, 1e-3))}
        made.reserve("notes", charge, "record", NEIGHBORING_RELATION)
        yield made


def test_methods_with_units_of_the_same_names_do_not_meet(ledger: Ledger) -> None:
    one, two = ledger.with_prefix("1-a."), ledger.with_prefix("2-b.")
    ledger.begin("run", "x", ["labels"])
    ledger.publish("run", "x", [("labels", SHA)])
    for method in (one, two):
        method.begin("run", "x", ["u", "v"])
    assert one.publish("run", "x", [("u", SHA)]) == 1
    assert list(one.published("run")) == [("u", ("x", SHA))] and not list(two.published("run"))
    assert two.fail("run", "u", "x", "ValueError")
    assert not list(one.failed("run"))
    assert list(two.failed("run")) == [("u", ("x", "ValueError"))]
    two.begin("run", "y", ["v"])
    assert list(two.started("run")) == [("u", "x"), ("v", "x"), ("v", "y")]
    assert list(one.unfinished("run")) == [("v", "x")]
    counted = {"started": 2, "starts": 3, "published": 0, "failed": 1, "committed": 0}
    assert two.counts("run") == counted
    assert {unit for unit, _ in ledger.started("run")} == {
        "labels", "1-a.u", "1-a.v", "2-b.u", "2-b.v",
    }  # fmt: skip
    with pytest.raises(AlreadyPublished):
        one.begin("run", "z", ["u"])
