"""The ledger's tables, and how an older ledger's are brought up to date.

The tables stand here as the code uses them. They are made by the revisions in `migrations`, one
after the other, for a new ledger as for an older one: tests/ledger/test_schema.py
compares the two. A ledger records its revision; one that was made before that was done is
recognised by its tables.
"""

from __future__ import annotations

import logging
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

VERSION = "dpray_version"
"""The table with the ledger's revision. Alembic creates it."""

REVISIONS = {
    "0001": {datasets.name, entries.name},
    "0002": {datasets.name, entries.name, secret.name},
}
"""The revisions that this version of dpray knows, the newest last, each with its tables."""

NEWEST = "0002"

MIGRATIONS = Path(__file__).with_name("migrations")

_LOCK = 0x6470726179


class UnknownTables(Exception):
    """The tables are not those of a revision that this version of dpray knows; the message goes
    behind "the ledger"."""


def revision(connection: sa.Connection) -> str | None:
    """Return the revision of a ledger's tables; None where the database holds no ledger. Raises
    UnknownTables for tables of a newer dpray, and where some are lost."""
    schema = _schema(connection)
    present = set(sa.inspect(connection).get_table_names(schema))
    if VERSION not in present:
        return max((name for name, own in REVISIONS.items() if own <= present), default=None)
    recorded = sa.table(VERSION, sa.column("version_num"), schema=schema)
    found = connection.execute(sa.select(recorded.c.version_num)).scalars().all()
    if len(found) != 1 or found[0] not in REVISIONS:
        names = ", ".join(repr(name) for name in found) or "none"
        raise UnknownTables(
            f"has the revision {names}, which this dpray does not know: a newer one may have made "
            f"it (this one knows {NEWEST})"
        )
    if lost := REVISIONS[found[0]] - present:
        raise UnknownTables(f"has lost its tables {', '.join(sorted(lost))}")
    return str(found[0])


def upgrade(connection: sa.Connection) -> None:
    """Make the tables that are missing, and bring an older ledger's up to date, in the connection's
    transaction."""
    # It would say of each step what it takes the database for.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # Imported late: few commands have anything to upgrade.
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory

    lock(connection)
    present = revision(connection)  # again: another process may have been first
    schema = _schema(connection)
    if connection.dialect.name == "postgresql":
        path = connection.dialect.identifier_preparer.quote(schema)
        connection.execute(sa.select(sa.func.set_config("search_path", path, True)))
    options = {"version_table": VERSION, "version_table_schema": schema}
    context = MigrationContext.configure(connection, opts=options)
    scripts = ScriptDirectory(str(MIGRATIONS))
    if present is not None:
        context.stamp(scripts, present)
    for step in reversed(list(scripts.iterate_revisions("head", present or "base"))):
        # Not by `alembic.op`, which all threads share.
        step.module.upgrade(Operations(context))
        context.stamp(scripts, step.revision)


def _schema(connection: sa.Connection) -> str:
    """Return the schema of the ledger's tables: PostgreSQL would take each of them from another one
    of its search path. For a ledger that is not there yet it is the one where tables are made."""
    if connection.dialect.name == "postgresql":
        found = connection.exec_driver_sql(
            "SELECT nspname FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace "
            f"WHERE pg_class.oid = to_regclass('{datasets.name}')"
        ).scalar()
        if found is not None:
            return str(found)
    return str(sa.inspect(connection).default_schema_name)


def lock(connection: sa.Connection) -> None:
    """Let one session at a time make tables or data sets; SQLite lets in one writer anyway."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
