"""Units of a run begin, are published or fail, on SQLite and on PostgreSQL alike."""

from __future__ import annotations

import pytest

from dpray.ledger import queries
from dpray.ledger.ledger import Ledger
from dpray.types import AlreadyPublished, LedgerConflict
from tests.ledger.charges import SHA, publish, reserve


def test_a_batch_is_published_once(ledger: Ledger):
    reserve(ledger, "run")
    ledger.begin("run", "attempt-1", ["a/0", "a/1"])
    assert publish(ledger, "a/0")
    assert not publish(ledger, "a/0")
    with pytest.raises(LedgerConflict, match="another content"):
        publish(ledger, "a/0", "attempt-1", "b" * 64)
    with pytest.raises(AlreadyPublished):
        publish(ledger, "a/0", "attempt-2")
    assert dict(ledger.published("run")) == {"a/0": ("attempt-1", SHA)}


def test_a_published_batch_does_not_begin_again(ledger: Ledger):
    reserve(ledger, "run")
    publish(ledger, "a/0")
    with pytest.raises(AlreadyPublished):
        ledger.begin("run", "attempt-2", ["a/1", "a/0"])
    assert list(ledger.started("run")) == []


def test_a_lost_batch_may_begin_again_and_is_counted(ledger: Ledger):
    reserve(ledger, "run")
    for _ in range(2):
        ledger.begin("run", "attempt-1", ["a/0", "a/1", "a/1"])
    publish(ledger, "a/0")
    assert list(ledger.unfinished("run")) == [("a/1", "attempt-1")]
    ledger.begin("run", "attempt-2", ["a/1"])
    publish(ledger, "a/1", "attempt-2")
    assert list(ledger.unfinished("run")) == []
    assert list(ledger.started("run")) == [
        ("a/0", "attempt-1"), ("a/1", "attempt-1"), ("a/1", "attempt-2"),
    ]  # fmt: skip
    counts = {"started": 2, "starts": 3, "published": 2, "failed": 0, "committed": 0}
    assert ledger.counts("run") == counts


def test_a_failed_batch_is_never_repeated(ledger: Ledger):
    reserve(ledger, "run")
    ledger.begin("run", "attempt-1", ["a/0"])
    assert ledger.fail("run", "a/0", "attempt-1", "ValueError")
    assert not ledger.fail("run", "a/0", "attempt-2", "KeyError")
    assert dict(ledger.failed("run")) == {"a/0": ("attempt-1", "ValueError")}
    assert list(ledger.unfinished("run")) == []
    with pytest.raises(LedgerConflict, match="failed"):
        ledger.begin("run", "attempt-2", ["a/0"])
    with pytest.raises(LedgerConflict, match="failed"):
        publish(ledger, "a/0")


def test_nothing_happens_under_a_committed_run(ledger: Ledger):
    reserve(ledger, "run")
    ledger.begin("run", "attempt-1", ["a/0"])
    assert ledger.commit("run")
    assert not ledger.commit("run")
    for act in (
        lambda: ledger.begin("run", "attempt-1", ["a/1"]),
        lambda: publish(ledger, "a/0"),
        lambda: ledger.fail("run", "a/0", "attempt-1", "ValueError"),
    ):
        with pytest.raises(LedgerConflict, match="committed"):
            act()
    assert reserve(ledger, "run").seq == 1


def test_nothing_happens_without_a_reservation(ledger: Ledger):
    for act in (
        lambda: ledger.begin("run", "attempt-1", ["a/1"]),
        lambda: publish(ledger, "a/0"),
        lambda: ledger.commit("run"),
    ):
        with pytest.raises(LedgerConflict, match="no reservation"):
            act()


def test_many_releases_are_one_transaction(ledger: Ledger):
    reserve(ledger, "run")
    units = [f"label/{n}" for n in range(1000)]
    assert ledger.publish("run", "attempt-1", ((unit, SHA) for unit in units)) == 1000
    assert ledger.publish("run", "attempt-1", ((unit, SHA) for unit in units)) == 0
    more = [("label/new", SHA), ("label/7", "b" * 64)]
    with pytest.raises(LedgerConflict):
        ledger.publish("run", "attempt-1", more)
    with pytest.raises(LedgerConflict, match="one release"):
        ledger.publish("run", "attempt-1", [("label/x", SHA), ("label/x", "b" * 64)])
    assert {unit for unit, _ in ledger.published("run")} == set(units)
    assert ledger.verify() == []


def test_listings_come_in_pages(ledger: Ledger):
    reserve(ledger, "run")
    units = [f"Ärger & Öl/{n}" for n in range(10)] + ["Z", "a", "_"]
    ledger.begin("run", "attempt-1", units)
    seen: list[str] = []
    after = ("", "")
    while page := ledger.read(queries.page, "begin", "run", after, limit=3):
        assert len(page) <= 3
        seen += [entry.unit for entry in page]
        after = (page[-1].unit, page[-1].attempt)
    assert sorted(seen) == sorted(unit for unit, _ in ledger.started("run")) == sorted(units)
