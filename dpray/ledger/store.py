"""The ledger's database: its tables, and its transactions in SQLite or PostgreSQL.

SQLite is for one machine, PostgreSQL for a cluster. A write is in a transaction that is on disk
before it returns. One transaction writes at a time: SQLite's `BEGIN IMMEDIATE` lets one writer in,
in PostgreSQL a lock of the ledger's own does. So writes are serialisable, and none is repeated
because of another.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import NullPool, QueuePool

from dpray.io.files import disk_is_full, touch_private
from dpray.ledger.errors import LedgerError, LedgerFull, LedgerUnavailable, MissingLedger
from dpray.ledger.url import check_one_name, parse_url
from dpray.types import DprayError, InputError, first_line

SECONDS_TO_WAIT = 60
"""A writer waits this long for the others before it gives up."""

TCP = {
    "connect_timeout": SECONDS_TO_WAIT,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 1000 * SECONDS_TO_WAIT,
}
"""libpq's keys, in seconds but for the last, in milliseconds: a server that disappears is noticed
within a minute. What the URL says instead is kept."""

TRANSIENT = frozenset({"57P01", "57P02", "57P03"})
"""PostgreSQL's states of a server that shuts down, crashed, or starts up."""

VERSION = 1
"""The version of the tables below. A ledger of another version is refused."""

metadata = sa.MetaData()

version = sa.Table("dpray_version", metadata, sa.Column("version", sa.Integer, primary_key=True))

datasets = sa.Table(
    "dpray_datasets",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    # Length and last hash of the chain: entries cut off its end leave no other trace.
    sa.Column("length", sa.BigInteger, nullable=False),
    sa.Column("head", sa.Text, nullable=False),
    # An admission reads the entries of the account alone: without the number of those that follow
    # the first one (reservations and tenants) it would not miss one.
    sa.Column("reservations", sa.BigInteger, nullable=False),
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

_LOCK = 0x6470726179


class Store:
    """The opened database of a ledger. `create` makes a ledger that is missing; without it that is
    a `MissingLedger`. A database with other tables, or of another version, is a `LedgerError`."""

    def __init__(self, url: str, *, create: bool) -> None:
        self._url = parse_url(url)
        self._is_sqlite = self._url.get_backend_name() == "sqlite"
        if create:
            self._create()
        engine = self._engine("rw")
        self._writer = engine.execution_options(dpray_write=True)
        snapshot = {} if self._is_sqlite else {"isolation_level": "REPEATABLE READ"}
        self._reader = engine.execution_options(**snapshot)
        self._held: sa.Connection | None = None
        with self._errors(), engine.begin() as connection:
            if not self._has_tables(connection):
                raise self._missing()

    def __str__(self) -> str:
        return self._url.render_as_string(hide_password=True)

    def close(self) -> None:
        self.release_connection()
        self._writer.dispose()

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Open one snapshot of the ledger."""
        with self._errors(), self._reader.begin() as connection:
            yield connection

    @contextmanager
    def begin(self) -> Iterator[sa.Connection]:
        """Open a transaction that writes, and is on disk at its end. It lets errors of the database
        through."""
        if self._is_sqlite and self._held is None:
            self._held = self._writer.connect()
        with self._writer.begin() as connection:
            self._lock(connection)
            yield connection

    def release_connection(self) -> None:
        """Release the connection that `begin` holds between writes. Call it once no write waits.

        When SQLite's last connection is closed, the write-ahead log is copied into the database,
        which takes longer than a commit. An idle connection puts that off while writes follow each
        other; after them the file is the whole ledger, as it is after a single write."""
        if self._held is not None:
            held, self._held = self._held, None
            held.close()

    def _lock(self, connection: sa.Connection) -> None:
        """Let one transaction at a time write to PostgreSQL; SQLite has let this one in alone."""
        if not self._is_sqlite:
            # A process that was stopped while it held the lock does not hold it for good.
            wait = f"{2 * SECONDS_TO_WAIT}s"
            connection.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout = '{wait}'")
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))

    def _create(self) -> None:
        """Make the tables if they are missing. Of several processes, one makes them."""
        if self._is_sqlite:
            touch_private(str(self._url.database))
        maker = self._engine("rwc").execution_options(dpray_write=True)
        try:
            with self._errors(making=True), maker.begin() as connection:
                self._lock(connection)
                if not self._has_tables(connection):
                    metadata.create_all(connection, checkfirst=False)
                    connection.execute(sa.insert(version), {"version": VERSION})
                    connection.execute(sa.insert(secret), {"data_key": secrets.token_hex(32)})
        finally:
            maker.dispose()

    def _has_tables(self, connection: sa.Connection) -> bool:
        """Return whether the database holds a ledger. Raises `LedgerError` for one that this
        version of dpray did not make, or that has lost a table."""
        schema = _schema(connection)
        present = set(sa.inspect(connection).get_table_names(schema))
        if not (found := {name for name in present if name.startswith("dpray_")}):
            return False
        if wrong := found ^ metadata.tables.keys():
            raise LedgerError(
                f"the ledger {self} does not have the tables that this version of dpray makes: "
                f"{', '.join(sorted(wrong))} is lost or unknown"
            )
        own = sa.table(version.name, sa.column("version"), schema=schema)
        known = list(connection.execute(sa.select(own.c.version)).scalars())
        if known != [VERSION]:
            raise LedgerError(
                f"the ledger {self} has tables of version {', '.join(map(str, known)) or 'none'}, "
                f"and this dpray knows version {VERSION} alone"
            )
        return True

    @contextmanager
    def _errors(self, *, making: bool = False) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            raise self.error(error, making) from error

    def error(self, error: SQLAlchemyError, making: bool = False) -> DprayError:
        """Return an error of the database as one for people."""
        cause = error.orig if isinstance(error, DBAPIError) else error
        # The database's own first line: no statement and no values.
        why = first_line(cause)
        path = Path(self._url.database or "")
        if self._is_sqlite and not path.is_file():
            if not making:
                return self._missing()
            why = why if path.parent.is_dir() else f"there is no folder {path.parent}"
            return MissingLedger(f"the ledger {self} cannot be made: {why}")
        if getattr(cause, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB:
            return InputError(f"the ledger {self} is no SQLite file: {why}")
        if disk_is_full(error):
            return LedgerFull(f"the ledger {self} failed: no space is left on its disk; make room")
        return LedgerUnavailable(f"the ledger {self} failed: {why}")

    def _missing(self) -> MissingLedger:
        return MissingLedger(
            f"there is no ledger at {self}: a missing ledger is refused, not made anew, because "
            "what was spent would be forgotten (`dpray ledger create` makes one)"
        )

    def _engine(self, sqlite_mode: str) -> sa.Engine:
        if self._is_sqlite:
            return _sqlite_engine(str(self._url.database), sqlite_mode)
        engine = sa.create_engine(
            self._url,
            poolclass=QueuePool,
            pool_pre_ping=True,
            hide_parameters=True,
            connect_args={k: v for k, v in TCP.items() if k not in self._url.query},
        )
        sa.event.listen(engine, "connect", _prepare_postgresql)
        return engine


def is_transient(error: BaseException) -> bool:
    """Return whether a transaction that ended so may succeed when it is made again: the connection
    or the server was lost."""
    # SQLite's errors have no such attribute. Without a state, libpq had no answer from the server.
    if not isinstance(error, OperationalError) or not hasattr(error.orig, "sqlstate"):
        return False
    state: str | None = getattr(error.orig, "sqlstate", None)
    return state is None or state.startswith("08") or state in TRANSIENT


def file_digests(connection: sa.Connection, contents: Iterable[bytes]) -> list[str]:
    """Return HMAC-SHA256 of each content under the ledger's own key, in hexadecimal. The key
    leaves the database for this alone: an export confirms no guess of a file."""
    key = connection.execute(sa.select(secret.c.data_key)).scalar()
    if key is None:
        raise LedgerError("the ledger has lost its key: nothing more is charged to it")
    own = bytes.fromhex(key)
    return [hmac.new(own, content, hashlib.sha256).hexdigest() for content in contents]


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


def _sqlite_engine(path: str, mode: str) -> sa.Engine:
    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"file:{quote(path)}?mode={mode}",
            uri=True,
            timeout=SECONDS_TO_WAIT,
            isolation_level=None,
            check_same_thread=False,
        )
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        return connection

    # A connection for each transaction: a kept one would go on writing into a deleted file.
    engine = sa.create_engine(
        "sqlite://", creator=connect, poolclass=NullPool, hide_parameters=True
    )

    def begin(connection: sa.Connection) -> None:
        # A transaction that reads first and writes later could read what another one is replacing.
        writes = connection.get_execution_options().get("dpray_write")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
        check_one_name(path)

    sa.event.listen(engine, "begin", begin)
    return engine


def _prepare_postgresql(connection: Any, _record: object) -> None:
    connection.autocommit = True
    with connection.cursor() as cursor:
        # A wait for another writer ends before the statement that waits.
        cursor.execute(f"SET lock_timeout = '{SECONDS_TO_WAIT}s'")
        cursor.execute(f"SET statement_timeout = '{2 * SECONDS_TO_WAIT}s'")
        # A server may be set to answer before a commit is on disk; the ledger may not.
        cursor.execute(
            "SELECT set_config('synchronous_commit', 'on', false) "
            "WHERE current_setting('synchronous_commit') = 'off'"
        )
    connection.autocommit = False
