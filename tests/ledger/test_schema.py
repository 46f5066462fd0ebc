"""The ledger's tables: made once, and refused if this version of dpray did not make them."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Barrier

import pytest
import sqlalchemy as sa

from dpray.ledger.ledger import Ledger
from dpray.ledger.queries import VERSION
from dpray.ledger.store import parse_url
from dpray.types import LedgerError, MissingLedger
from tests.ledger.charges import BUDGET, STATED_FOR, publish, reserve

Transaction = Callable[[], AbstractContextManager[sa.Connection]]


def test_a_ledger_that_cannot_be_made_whole_is_not_made(
    url: str, connection: Transaction, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_key(size: int) -> str:
        raise OSError("no randomness")

    with monkeypatch.context() as patch:
        patch.setattr("secrets.token_hex", no_key)
        with pytest.raises(OSError, match="no randomness"):
            Ledger.create_or_open(url)
    with connection() as opened:
        assert sa.inspect(opened).get_table_names() == []
    with pytest.raises(MissingLedger):
        Ledger.open(url)
    assert Ledger.create_or_open(url).verify() == []


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE dpray_version SET version = 999",
        "INSERT INTO dpray_version VALUES (999)",
        "DELETE FROM dpray_version",
        "DROP TABLE dpray_version",
        "DROP TABLE dpray_secret",
        "CREATE TABLE dpray_newer (a INTEGER)",
    ],
)
def test_a_ledger_that_is_not_known_is_refused(
    url: str, connection: Transaction, statement: str
) -> None:
    Ledger.create_or_open(url)
    with connection() as opened:
        opened.exec_driver_sql(statement)
    for open_ledger in (Ledger.open, Ledger.create_or_open):
        with pytest.raises(LedgerError, match="does not have the tables of version 1") as refused:
            open_ledger(url)
        assert "\n" not in str(refused.value)


def test_tables_of_others_are_left_alone(url: str, connection: Transaction) -> None:
    if url.startswith("sqlite"):
        Path(url.removeprefix("sqlite:///")).touch()
    with connection() as opened:
        opened.exec_driver_sql("CREATE TABLE of_others (a INTEGER)")
    with pytest.raises(MissingLedger):
        Ledger.open(url)
    Ledger.create_or_open(url)
    assert Ledger.open(url).verify() == []


def test_two_ledgers_in_two_schemas_are_two_ledgers(postgresql_url: str) -> None:
    """Another one that the search path also finds is no part of the first one."""
    engine = sa.create_engine(parse_url(postgresql_url), poolclass=sa.NullPool)
    a, b, empty = (f"{name}_{uuid.uuid4().hex}" for name in ("a", "b", "empty"))
    with engine.begin() as opened:
        for name in (a, b, empty):
            opened.exec_driver_sql(f"CREATE SCHEMA {name}")
    own = postgresql_url.partition("%3D")[2]  # its search path
    first, second, both, later = (
        postgresql_url.replace(own, path) for path in (a, b, f"{a},{b}", f"{empty},{a}")
    )
    for one in (first, second):
        Ledger.create_or_open(one)
    with engine.begin() as opened:
        opened.exec_driver_sql(f"UPDATE {b}.dpray_version SET version = 999")
    assert Ledger.open(both).verify() == []
    with pytest.raises(MissingLedger):  # tables are made, and looked for, in the first schema
        Ledger.open(later)
    with engine.begin() as opened:
        opened.exec_driver_sql(f"DROP TABLE {a}.dpray_secret")
    with pytest.raises(LedgerError, match="has lost a table"):
        Ledger.open(both)
    engine.dispose()


def test_a_role_charges_with_the_grants_that_the_page_names(postgresql_url: str) -> None:
    Ledger.create_or_open(postgresql_url)
    role, engine = f"role_{uuid.uuid4().hex}", sa.create_engine(parse_url(postgresql_url))
    schema = postgresql_url.partition("%3D")[2]
    with engine.begin() as opened:
        for statement in (
            f"CREATE ROLE {role} LOGIN",
            f"GRANT USAGE ON SCHEMA {schema} TO {role}",
            f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {role}",
            f"GRANT INSERT ON dpray_entries TO {role}",
            f"GRANT INSERT, UPDATE ON dpray_datasets TO {role}",
        ):
            opened.exec_driver_sql(statement)
    engine.dispose()
    ledger = Ledger.open(postgresql_url.replace("postgres@", f"{role}@"))
    ledger.create_dataset("notes", BUDGET, *STATED_FOR)
    reserve(ledger, "run", files=[b"file"])
    assert publish(ledger, "a/0") == 1
    assert ledger.commit("run") and ledger.verify() == []


def test_one_of_many_makes_the_tables(url: str, connection: Transaction) -> None:
    together = Barrier(8)

    def make(_: int) -> None:
        together.wait()
        Ledger.create_or_open(url)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make, range(8)))
    with connection() as opened:
        assert opened.execute(sa.text("SELECT count(*) FROM dpray_secret")).scalar() == 1
        assert opened.execute(sa.text("SELECT version FROM dpray_version")).scalars().all() == [
            VERSION
        ]
