"""The ledger's tables, as they are made and as older ledgers are brought up to them."""

from __future__ import annotations

import secrets

import sqlalchemy as sa

metadata = sa.MetaData()

datasets = sa.Table(
    "dpray_datasets",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    # Length and last hash of the chain: entries cut off its end leave no other trace.
    sa.Column("length", sa.BigInteger, nullable=False),
    sa.Column("head", sa.Text, nullable=False),
    # An admission reads the reservations alone: without their number it would not miss one.
    sa.Column("reservations", sa.BigInteger, nullable=False),
)

ACCOUNT = sa.text("kind IN ('create', 'reserve')")
"""The entries that an admission reads. Written out, because a database matches the words of a query
with those of its partial index."""

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

OLDEST = frozenset({datasets.name, entries.name})
"""The tables that every ledger has; one with these alone is of a version before `secret`."""

_LOCK = 0x6470726179


def lock(connection: sa.Connection) -> None:
    """Let one session at a time make tables or data sets; SQLite lets in one writer anyway."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))


def make(connection: sa.Connection) -> None:
    """Make what is missing of the tables, and bring an older ledger's up to date; in a transaction
    of its own."""
    lock(connection)
    present = sa.inspect(connection).get_table_names()
    older = set(present) >= OLDEST and secret.name not in present
    if older:
        _count_reservations(connection)
    metadata.create_all(connection)
    if older:
        account_index.create(connection)
    if secret.name not in present:
        connection.execute(sa.insert(secret).values(data_key=secrets.token_hex(32)))


def _count_reservations(connection: sa.Connection) -> None:
    """Add the number of reservations to the rows of an older ledger. A data set that has lost
    entries gets a number that no chain has: nothing more is charged to it."""
    connection.exec_driver_sql(
        f"ALTER TABLE {datasets.name} ADD COLUMN reservations BIGINT NOT NULL DEFAULT -1"
    )
    own = sa.select(sa.func.count()).where(entries.c.dataset == datasets.c.name)
    counted = own.where(entries.c.kind == "reserve").scalar_subquery()
    whole = own.scalar_subquery() == datasets.c.length
    connection.execute(sa.update(datasets).where(whole).values(reservations=counted))
