"""The ledger's tables, and the queries that are made of them."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator, Sequence

import sqlalchemy as sa

from dpray.ledger.account import Account
from dpray.ledger.chain import Chain, Entry, folded
from dpray.types import InputError, LedgerError, in_parts

VERSION = 1
"""The version of the tables below. A ledger of another version is refused."""

LOOKED_UP_AT_ONCE = 500
"""One statement looks up at most this many rows."""

ROWS_AT_A_TIME = 2_000

PAGE = 10_000

metadata = sa.MetaData()

version = sa.Table("dpray_version", metadata, sa.Column("version", sa.Integer, primary_key=True))

datasets = sa.Table(
    "dpray_datasets",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    # Length and last hash of the chain: entries cut off its end leave no other trace.
    sa.Column("length", sa.BigInteger, nullable=False),
    sa.Column("head", sa.Text, nullable=False),
    # An admission reads the entries of the account only: it would not miss a deleted reservation
    # without their number.
    sa.Column("reservations", sa.BigInteger, nullable=False),
)

ACCOUNT = sa.text("kind IN ('create', 'reserve')")
"""The entries that an admission reads. The condition is text, because a database matches the words
of a query with those of its partial index."""

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

# Made once: every operation asks them, and making one takes as long as asking it.
_WITH_KEYS = sa.select(entries).where(
    entries.c.kind == sa.bindparam("kind"),
    entries.c.key.in_(sa.bindparam("keys", expanding=True)),
    entries.c.unit == "",
)
_BEGUN = sa.select(entries.c.unit).where(
    entries.c.kind == "begin",
    entries.c.key == sa.bindparam("key"),
    entries.c.unit.in_(sa.bindparam("units", expanding=True)),
    entries.c.attempt == sa.bindparam("attempt"),
)
_OUTCOMES = sa.select(entries.c.kind, entries.c.unit, entries.c.payload).where(
    entries.c.kind.in_(("publish", "fail", "commit")),
    entries.c.key == sa.bindparam("key"),
    entries.c.unit.in_(sa.bindparam("units", expanding=True)),
    entries.c.attempt == "",
)
_END = sa.select(datasets).where(datasets.c.name == sa.bindparam("name"))
INSERT = sa.insert(entries)
SET_END = (
    sa.update(datasets)
    .where(datasets.c.name == sa.bindparam("own"))
    .values({name: sa.bindparam(name) for name in Chain("").end})
)


def find(connection: sa.Connection, kind: str, key: str) -> Entry | None:
    """Return the one entry of this kind and key, or None."""
    return find_all(connection, kind, [key]).get(key)


def find_all(connection: sa.Connection, kind: str, keys: Iterable[str]) -> dict[str, Entry]:
    """Return the entries of this kind with these keys, by key."""
    return {
        row.key: Entry(**row._mapping)
        for part in in_parts(keys, LOOKED_UP_AT_ONCE)
        for row in connection.execute(_WITH_KEYS, {"kind": kind, "keys": part})
    }


def entry_at(connection: sa.Connection, dataset: str, sequence: int) -> Entry | None:
    """Return the entry at this place of a data set's chain, or None."""
    place = (entries.c.dataset == dataset, entries.c.seq == sequence)
    row = connection.execute(sa.select(entries).where(*place)).first()
    return None if row is None else Entry(**row._mapping)


def outcomes(
    connection: sa.Connection, charge_key: str, units: Iterable[str]
) -> Iterator[tuple[str, str, str]]:
    """Yield kind, unit and payload of the entries that end these units; "" is the run itself."""
    for part in in_parts(units, LOOKED_UP_AT_ONCE):
        for row in connection.execute(_OUTCOMES, {"key": charge_key, "units": part}):
            yield row.kind, row.unit, row.payload


def begun(
    connection: sa.Connection, charge_key: str, units: Sequence[str], attempt: str
) -> set[str]:
    """Return the units that this attempt has begun."""
    return {
        unit
        for part in in_parts(units, LOOKED_UP_AT_ONCE)
        for (unit,) in connection.execute(
            _BEGUN, {"key": charge_key, "attempt": attempt, "units": part}
        )
    }


def page(
    connection: sa.Connection, kind: str, charge_key: str, after: tuple[str, str], limit: int = PAGE
) -> list[Entry]:
    """Return the first `limit` entries of a run of one kind after this unit and attempt."""
    place = sa.tuple_(entries.c.unit, entries.c.attempt)
    query = (
        sa.select(entries)
        .where(entries.c.kind == kind, entries.c.key == charge_key)
        .where(place > sa.tuple_(*map(sa.literal, after)))
        .order_by(entries.c.unit, entries.c.attempt)
        .limit(limit)
    )
    return [Entry(**row._mapping) for row in connection.execute(query)]


def count(connection: sa.Connection, charge_key: str) -> dict[str, int]:
    """Return the numbers that `RunLedger.counts` returns."""

    def number(kind: str, what: sa.ColumnElement[int]) -> int:
        of_run = (entries.c.kind == kind, entries.c.key == charge_key)
        return int(connection.execute(sa.select(what).where(*of_run)).scalar_one())

    return {
        "started": number("begin", sa.func.count(entries.c.unit.distinct())),
        "starts": number("begin", sa.func.count()),
        "published": number("publish", sa.func.count()),
        "failed": number("fail", sa.func.count()),
        "committed": number("commit", sa.func.count()),
    }


def dataset_names(connection: sa.Connection) -> list[str]:
    """Return the names of the data sets, in order."""
    query = sa.select(datasets.c.name).order_by(datasets.c.name)
    return list(connection.execute(query).scalars())


def stored_name(connection: sa.Connection, name: str) -> str | None:
    """Return the ledger's spelling of a data set's name, or None if it has no such data set."""
    made = sa.select(entries.c.dataset).where(entries.c.kind == "create")
    known = connection.execute(sa.union(sa.select(datasets.c.name), made)).scalars()
    return next((other for other in known if folded(other) == folded(name)), None)


def known_name(connection: sa.Connection, dataset: str) -> str:
    """Return the ledger's spelling of a data set's name. Raises `InputError` for a data set that
    the ledger does not have."""
    if (own := stored_name(connection, dataset)) is None:
        known = ", ".join(map(repr, dataset_names(connection))) or "none"
        raise InputError(
            f"privacy.dataset: the ledger has no data set {dataset!r}; it has {known} "
            "(`dpray ledger create --ledger URL --dataset NAME --epsilon E --delta D` makes one)"
        )
    return own


def end(connection: sa.Connection, dataset: str) -> Chain:
    """Return the end of a data set's chain, as its row states it."""
    row = connection.execute(_END, {"name": dataset}).first()
    if row is None or not isinstance(row.length, int):  # SQLite takes a text for a number
        raise broken_chain(dataset)
    return Chain(dataset, row.length, row.head, row.reservations)


def check_end(connection: sa.Connection, chain: Chain) -> None:
    """Raise `LedgerError` unless the chain's last entry is the one that the data set's row
    states."""
    last = entry_at(connection, chain.dataset, chain.length - 1)
    if last is None or not last.hash == last.digest() == chain.head:
        raise broken_chain(chain.dataset)


def counted_entries(connection: sa.Connection, dataset: str) -> list[Entry]:
    """Return the entries of a data set's account (create, reserve and raise), in their order."""
    # A data set may have a million other rows, and SQLite would rather walk over them by their key.
    by_index = f"INDEXED BY {account_index.name}" if connection.dialect.name == "sqlite" else ""
    query = sa.text(
        f"SELECT {', '.join(entries.c.keys())} FROM {entries.name} {by_index} "
        f"WHERE dataset = :dataset AND {ACCOUNT} ORDER BY seq"
    )
    found = [Entry(*row) for row in connection.execute(query, {"dataset": dataset})]
    # Older ledgers' partial index lacks the raises, which the index of identities finds.
    raises = sa.select(entries).where(entries.c.kind == "raise", entries.c.key == dataset)
    found += [Entry(**row._mapping) for row in connection.execute(raises)]
    return sorted(found, key=lambda entry: entry.seq)


def all_entries(connection: sa.Connection) -> Iterator[Entry]:
    """Yield every entry, ordered by data set and place in its chain, without holding them all."""
    query = sa.select(entries).order_by(entries.c.dataset, entries.c.seq)
    for row in connection.execute(query.execution_options(yield_per=ROWS_AT_A_TIME)):
        yield Entry(**row._mapping)


def read_account(connection: sa.Connection, dataset: str) -> Account:
    """Return the account of a data set, by its name in the ledger. Work grows with the number of
    its runs, not of units, nor of other data sets. Raises `LedgerError` if an entry that counts was
    altered or is missing."""
    rows = counted_entries(connection, dataset)
    if (
        not rows
        or rows[0].kind != "create"
        or end(connection, dataset).reservations != len(rows) - 1
        or any(entry.hash != entry.digest() for entry in rows)
    ):
        raise broken_chain(dataset)
    return Account.replay(rows)


def find_account(connection: sa.Connection, dataset: str) -> Account | None:
    """Return the account of a data set by any spelling of its name, or None if there is none."""
    name = stored_name(connection, dataset)
    return None if name is None else read_account(connection, name)


def file_digests(connection: sa.Connection, contents: Iterable[bytes]) -> list[str]:
    """Return HMAC-SHA256 of each content under the ledger's own key, in hexadecimal. The key
    leaves the database only for this: an export confirms no guess of a file."""
    if not (contents := list(contents)):
        return []
    own = data_key(connection)
    return [hmac.new(own, content, hashlib.sha256).hexdigest() for content in contents]


def data_key(connection: sa.Connection) -> bytes:
    """Return the ledger's own key. Raises `LedgerError` if it is lost."""
    try:
        [digits] = connection.execute(sa.select(secret.c.data_key)).scalars()
        key = bytes.fromhex(digits)
    except (ValueError, TypeError):
        key = b""
    if len(key) != 32:
        raise LedgerError("the ledger has lost its key: nothing more is charged to it")
    return key


def broken_chain(dataset: str) -> LedgerError:
    return LedgerError(
        f"the ledger's entries of '{dataset}' are not as they were written: nothing more is "
        "charged to it (see `dpray ledger verify`)"
    )
