"""Data sets and their chains of entries."""

import sqlalchemy as sa
from alembic.operations import Operations

revision = "0001"
down_revision = None


def upgrade(op: Operations) -> None:
    op.create_table(
        "dpray_datasets",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("length", sa.BigInteger, nullable=False),
        sa.Column("head", sa.Text, nullable=False),
    )
    op.create_table(
        "dpray_entries",
        sa.Column("dataset", sa.Text, primary_key=True),
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("unit", sa.Text, nullable=False),
        sa.Column("attempt", sa.Text, nullable=False),
        sa.Column("at", sa.Text, nullable=False),
        sa.Column("payload", sa.Text, nullable=False),
        sa.Column("prev_hash", sa.Text, nullable=False),
        sa.Column("hash", sa.Text, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_index(
        "dpray_entries_identity", "dpray_entries", ["kind", "key", "unit", "attempt"], unique=True
    )
