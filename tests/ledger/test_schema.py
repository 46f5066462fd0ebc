"""The ledger's tables: those that the revisions make are those that the code uses."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from threading import Barrier, Thread

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from dpray.ledger.ledger import Ledger
from dpray.ledger.schema import (
    MIGRATIONS,
    NEWEST,
    REVISIONS,
    VERSION,
    metadata,
    revision,
)
from dpray.ledger.store import LedgerError
from dpray.ledger.url import parse_url

Transaction = Callable[[], AbstractContextManager[sa.Connection]]


def test_the_revisions_are_those_of_the_folder() -> None:
    scripts = ScriptDirectory(str(MIGRATIONS)).walk_revisions()
    assert [script.revision for script in scripts][::-1] == list(REVISIONS)
    assert list(REVISIONS)[-1] == NEWEST


def test_the_revisions_make_the_tables_that_the_code_uses(
    url: str, connection: Transaction
) -> None:
    Ledger.create_or_open(url)
    with connection() as opened:
        assert revision(opened) == NEWEST
        options = {"compare_type": True, "compare_server_default": True}
        context = MigrationContext.configure(opened, opts=options)
        found = compare_metadata(context, metadata)
    # The table of the revision is Alembic's own.
    assert [difference[1].name for difference in found] == [VERSION]


def test_a_ledger_without_a_written_revision_is_known_by_its_tables(
    url: str, connection: Transaction
) -> None:
    Ledger.create_or_open(url)
    for gone, expected in ((VERSION, "0002"), ("dpray_secret", "0001")):
        with connection() as opened:
            opened.exec_driver_sql(f"DROP TABLE {gone}")
            assert revision(opened) == expected
    with connection() as opened:
        opened.exec_driver_sql("DROP TABLE dpray_entries")
        assert revision(opened) is None


def test_a_revision_that_fails_changes_nothing(
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
    Ledger.create_or_open(url)
    with connection() as opened:
        assert revision(opened) == NEWEST


@pytest.mark.parametrize("open_ledger", [Ledger.open, Ledger.create_or_open])
@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (f"UPDATE {VERSION} SET version_num = '0999'", "has the revision '0999', which this dpray"),
        (f"INSERT INTO {VERSION} VALUES ('0999')", "has the revision '0002', '0999', which this"),
        (f"DELETE FROM {VERSION}", "has the revision none, which this dpray does not know"),
        ("DROP TABLE dpray_secret", "has lost its tables dpray_secret$"),
    ],
)
def test_a_ledger_that_is_not_known_is_refused(
    url: str,
    connection: Transaction,
    open_ledger: Callable[[str], Ledger],
    statement: str,
    said: str,
) -> None:
    Ledger.create_or_open(url)
    with connection() as opened:
        opened.exec_driver_sql(statement)
    with pytest.raises(LedgerError, match=said):
        open_ledger(url)


def test_two_ledgers_in_two_schemas_are_two_ledgers(postgresql_url: str) -> None:
    """A newer one that the search path also finds is no part of the first one."""
    engine = sa.create_engine(parse_url(postgresql_url), poolclass=sa.NullPool)
    a, b = (f"{name}_{uuid.uuid4().hex}" for name in "ab")
    with engine.begin() as opened:
        for name in (a, b):
            opened.exec_driver_sql(f"CREATE SCHEMA {name}")
    own = postgresql_url.partition("%3D")[2]  # its search path
    first, second, both = (postgresql_url.replace(own, path) for path in (a, b, f"{a},{b}"))
    for one in (first, second):
        Ledger.create_or_open(one)
    with engine.begin() as opened:
        opened.exec_driver_sql(f"UPDATE {b}.{VERSION} SET version_num = '0999'")
        opened.exec_driver_sql(f"DROP TABLE {a}.{VERSION}")
        opened.exec_driver_sql(f"DROP TABLE {a}.dpray_secret")
        opened.exec_driver_sql(f"DROP INDEX {a}.dpray_entries_account")
        opened.exec_driver_sql(f"ALTER TABLE {a}.dpray_datasets DROP COLUMN reservations")
    assert Ledger.open(both).verify() == []
    empty = f"{a}_empty"
    with engine.begin() as opened:
        opened.exec_driver_sql(f"CREATE SCHEMA {empty}")
    assert Ledger.open(postgresql_url.replace(own, f"{empty},{a}")).verify() == []
    with engine.begin() as opened:
        for schema, expected in ((a, NEWEST), (b, "0999")):
            found = opened.exec_driver_sql(f"SELECT version_num FROM {schema}.{VERSION}").scalars()
            assert found.all() == [expected]
    engine.dispose()


def at_once(work: Sequence[Callable[[], object]]) -> list[Exception]:
    """Do it in a thread each; return what was raised."""
    together, errors = Barrier(len(work)), []

    def do(one: Callable[[], object]) -> None:
        together.wait()
        try:
            one()
        except Exception as error:
            errors.append(error)

    threads = [Thread(target=do, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_one_of_many_makes_the_tables(url: str, connection: Transaction) -> None:
    assert at_once([partial(Ledger.create_or_open, url)] * 8) == []
    with connection() as opened:
        assert opened.execute(sa.text("SELECT count(*) FROM dpray_secret")).scalar() == 1
        assert opened.execute(sa.text(f"SELECT version_num FROM {VERSION}")).scalars().all() == [
            NEWEST
        ]


def test_many_make_a_ledger_each(tmp_path: Path) -> None:
    urls = [f"sqlite:///{tmp_path}/{number}.db" for number in range(16)]
    assert at_once([partial(Ledger.create_or_open, url) for url in urls]) == []
    for url in urls:
        assert Ledger.open(url).verify() == []
