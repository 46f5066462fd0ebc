"""The ledger's tables, and how an older ledger's are brought up to date.

The tables stand here as the code uses them. They are made by the revisions in `migrations`, one
after the other, for a new ledger as for an older one: tests/accounting/test_ledger_schema.py
compares the two. Each ledger holds the revision that it has.
"""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

metadata = sa.MetaData()

datasets = sa.Table(
    "dpray_datasets",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    # Length and last hash of the chain: entries cut off its end leave no other trace.
    sa.Column("length", sa.BigInteger, nullable=False),
    sa.Column("head", sa.Text, nullable=False),
    # An admission reads the entries of the account alone: without the number of those that follow
    # the first one (reservations and tenants) it would not miss one.
    sa.Column("reservations", sa.BigInteger, nullable=False, server_default=sa.text("-1")),
)

ACCOUNT = sa.text("kind IN ('create', 'reserve')")
"""An admission reads these entries. The condition is written out, because a database matches the
words of a query with those of its partial index."""

entries = sa.Table(
    "dpray_entries",
    metadata,
    sa.Column("dataset", sa.Text, primary_key=True),
    sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
    *(
        sa.Column(name, sa.Text, nullable=False)
        for name in ("kind", "key", "unit", "attempt", "at", "payload", "prev_hash", "hash")
    ),
    sa.Index("dpray_entries_identity", "kind", "key", "unit", "attempt", unique=True),
    sqlite_with_rowid=False,
)

account_index = sa.Index(
    "dpray_entries_account",
    entries.c.dataset,
    entries.c.seq,
    sqlite_where=ACCOUNT,
    postgresql_where=ACCOUNT,
)

secret = sa.Table(
    "dpray_secret",
    metadata,
    # One row: the key of the digests by which files of data are known again.
    sa.Column("data_key", sa.Text, primary_key=True),
)

version = sa.Table("dpray_version", sa.MetaData(), sa.Column("version_num", sa.String(32)))
"""Alembic's table of the revision; it makes it."""

REVISIONS = ("0001", "0002")
"""All that this version of dpray knows, the newest last."""

MIGRATIONS = Path(__file__).with_name("migrations")

_LOCK = 0x6470726179


def revision(connection: sa.Connection) -> str | None:
    """Return the revision of a ledger's tables; None where the database holds no ledger. Ledgers of
    the time before revisions were written down are known by their tables."""
    present = set(sa.inspect(connection).get_table_names())
    if version.name in present:
        found = connection.execute(sa.select(version.c.version_num)).scalar()
        if found is not None:
            return str(found)
    if not present >= {datasets.name, entries.name}:
        return None
    return REVISIONS[1] if secret.name in present else REVISIONS[0]


def upgrade(connection: sa.Connection) -> None:
    """Make the tables that are missing, and bring an older ledger's up to date, in the connection's
    transaction."""
    # Imported late: few commands find anything to do.
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory

    lock(connection)
    present = revision(connection)  # again: another process may have been first
    context = MigrationContext.configure(connection, opts={"version_table": version.name})
    scripts = ScriptDirectory(str(MIGRATIONS))
    if present is not None:
        context.stamp(scripts, present)
    steps = scripts.iterate_revisions("head", present or "base")
    with Operations.context(context):
        for step in reversed(list(steps)):
            step.module.upgrade()
            context.stamp(scripts, step.revision)


def lock(connection: sa.Connection) -> None:
    """Let one session at a time make tables or data sets; SQLite lets in one writer anyway."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
