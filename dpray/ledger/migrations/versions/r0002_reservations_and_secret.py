"""The number of each data set's reservations, an index of what an admission reads, and the key of
the digests by which files are known again."""

import secrets

import sqlalchemy as sa
from alembic.operations import Operations

revision = "0002"
down_revision = "0001"

ACCOUNT = sa.text("kind IN ('create', 'reserve')")


def upgrade(op: Operations) -> None:
    # A data set that has lost entries keeps -1, which no chain can have, so nothing more is charged
    # to it.
    op.add_column(
        "dpray_datasets",
        sa.Column("reservations", sa.BigInteger, nullable=False, server_default=sa.text("-1")),
    )
    op.execute(
        """
        UPDATE dpray_datasets SET reservations =
            (SELECT count(*) FROM dpray_entries WHERE dataset = name AND kind = 'reserve')
        WHERE length = (SELECT count(*) FROM dpray_entries WHERE dataset = name)
        """
    )
    op.create_index(
        "dpray_entries_account",
        "dpray_entries",
        ["dataset", "seq"],
        sqlite_where=ACCOUNT,
        postgresql_where=ACCOUNT,
    )
    secret = op.create_table("dpray_secret", sa.Column("data_key", sa.Text, primary_key=True))
    op.bulk_insert(secret, [{"data_key": secrets.token_hex(32)}])
