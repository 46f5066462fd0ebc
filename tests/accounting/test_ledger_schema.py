"""The ledger's tables: those that the revisions make are those that the code uses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Barrier, Thread

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from dpray.accounting.ledger import Ledger
from dpray.accounting.ledger_schema import MIGRATIONS, REVISIONS, metadata, revision, version
from dpray.types import InputError

Transaction = Callable[[], AbstractContextManager[sa.Connection]]


def test_the_revisions_are_those_of_the_folder() -> None:
    scripts = ScriptDirectory(str(MIGRATIONS)).walk_revisions()
    assert tuple(script.revision for script in scripts)[::-1] == REVISIONS


def test_the_revisions_make_the_tables_that_the_code_uses(
    url: str, connection: Transaction
) -> None:
    Ledger.create_or_open(url)
    with connection() as opened:
        assert revision(opened) == REVISIONS[-1]
        options = {"compare_type": True, "compare_server_default": True}
        context = MigrationContext.configure(opened, opts=options)
        found = compare_metadata(context, metadata)
    # The table of the revision is Alembic's own.
    assert [difference[1].name for difference in found] == [version.name]


def test_a_ledger_without_a_written_revision_is_known_by_its_tables(
    url: str, connection: Transaction
) -> None:
    Ledger.create_or_open(url)
    for gone, expected in ((version.name, "0002"), ("dpray_secret", "0001")):
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
        assert revision(opened) == REVISIONS[-1]


@pytest.mark.parametrize("open_ledger", [Ledger.open, Ledger.create_or_open])
def test_a_newer_ledger_is_refused(
    url: str, connection: Transaction, open_ledger: Callable[[str], Ledger]
) -> None:
    Ledger.create_or_open(url)
    with connection() as opened:
        opened.execute(sa.update(version).values(version_num="0999"))
    with pytest.raises(InputError, match=r"tables of a newer dpray \(revision 0999, this one"):
        open_ledger(url)


def test_one_of_many_makes_the_tables(url: str, connection: Transaction) -> None:
    together, errors = Barrier(8), []

    def make() -> None:
        together.wait()
        try:
            Ledger.create_or_open(url)
        except Exception as error:
            errors.append(error)

    threads = [Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with connection() as opened:
        assert opened.execute(sa.text("SELECT count(*) FROM dpray_secret")).scalar() == 1
        assert opened.execute(sa.select(version.c.version_num)).scalars().all() == [REVISIONS[-1]]
