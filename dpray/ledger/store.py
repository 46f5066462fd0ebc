"""The ledger's database, SQLite or PostgreSQL: its URL, its connections and its transactions.

SQLite is for one machine, PostgreSQL for a cluster. A write is in a transaction that is on disk
before it returns. One transaction writes at a time: SQLite's `BEGIN IMMEDIATE` lets one writer in,
in PostgreSQL a lock of the ledger's own does. So writes are serialisable, and none is repeated
because of another.
"""

from __future__ import annotations

import os
import re
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import NullPool, QueuePool

from dpray.extras import require
from dpray.io.files import (
    disk_is_full,
    in_ray_package,
    is_mounted_alone,
    names_of_file,
    network_file_system,
    touch_private,
)
from dpray.ledger.queries import VERSION, metadata, secret, version
from dpray.types import (
    DprayError,
    InputError,
    LedgerError,
    LedgerFull,
    LedgerUnavailable,
    MissingLedger,
    first_line,
)

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
        with self._errors(), engine.begin() as connection:
            if not self._has_tables(connection):
                raise self._missing()

    def __str__(self) -> str:
        return shown_url(self._url)

    def close(self) -> None:
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
        with self._writer.begin() as connection:
            self._lock(connection)
            yield connection

    def _lock(self, connection: sa.Connection) -> None:
        """Let one transaction at a time write to PostgreSQL; SQLite has let this one in alone."""
        if not self._is_sqlite:
            # The server takes the lock back from a process that was stopped.
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
        inspected = sa.inspect(connection)
        # Of the first schema only: another one of the search path may have a table that is lost.
        present = inspected.get_table_names(inspected.default_schema_name)
        if not (found := {name for name in present if name.startswith("dpray_")}):
            return False
        known = []
        if found == metadata.tables.keys():
            known = list(connection.execute(sa.select(version.c.version)).scalars())
        if known != [VERSION]:
            raise LedgerError(
                f"the ledger {self} does not have the tables of version {VERSION}, which this "
                "version of dpray makes and knows: it is another version's, or has lost a table"
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
            f"there is no ledger at {self}: a missing ledger is refused, not made again, because "
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


def parse_url(url: str) -> sa.URL:
    """Return the URL, checked, with its driver named, an SQLite path made absolute (the accountant
    actor has another working directory), and TLS asked for if PostgreSQL is on another machine.

    Raises `InputError`, also for an SQLite file in a place that would lose it or its locks.
    """
    try:
        parsed = sa.make_url(url)
    except (ArgumentError, ValueError):
        # Without its cause, which quotes the port: the password, if its `@` is forgotten.
        raise InputError(
            "the ledger's URL has to look like sqlite:///ledger.db or postgresql://host/name"
        ) from None
    if parsed.drivername in ("sqlite", "sqlite+pysqlite"):
        database = parsed.database or ""
        beyond = parsed.host or parsed.username or parsed.query
        if database in ("", ":memory:") or "\0" in database or beyond:
            raise InputError("an SQLite ledger is a plain file: sqlite:///path/to/ledger.db")
        path = os.path.abspath(database)
        _check_place(path)
        return parsed.set(drivername="sqlite", database=path)
    if parsed.drivername in ("postgresql", "postgresql+psycopg"):
        require("a ledger on PostgreSQL", "psycopg")
        return _with_tls(parsed.set(drivername="postgresql+psycopg"))
    raise InputError(f"a ledger is SQLite or PostgreSQL, not {parsed.drivername}")


def shown_url(url: sa.URL) -> str:
    """Return a ledger's URL without its password."""
    # libpq takes passwords from the query too.
    hidden = dict.fromkeys((key for key in url.query if "password" in key), "hidden")
    return url.update_query_dict(hidden).render_as_string(hide_password=True)


def _check_place(path: str) -> None:
    if in_ray_package(path):
        raise InputError(
            f"the ledger {path} lies in a copy of a job's working directory, which Ray deletes, "
            "and what was spent with it: give postgresql://host/name, or an absolute path "
            "(sqlite:////folder/ledger.db) outside"
        )
    if (kind := network_file_system(path)) is not None:
        raise InputError(
            f"the ledger {path} lies on a network file system ({kind}), where SQLite's locks do "
            "not hold and two runs could spend one budget: give postgresql://host/name, or a "
            "path on a local disk"
        )
    check_one_name(path)


def check_one_name(path: str) -> None:
    """Raise `InputError` if an SQLite file can be reached by a second name: SQLite keeps its newest
    entries, and its locks, in files next to the name by which it was opened. Symbolic links are no
    second name, because SQLite follows them.

    Called in every transaction: a name may be added while the ledger is open. Then both names are
    refused.
    """
    why = (
        "SQLite keeps the newest entries next to each name, so that one budget would be spent twice"
    )
    if (names := names_of_file(path)) > 1:
        raise InputError(
            f"the ledger {path} has {names} names (hard links): {why}; end every command that "
            "uses it, keep the name that has a `-wal` file next to it (any, if none has one), and "
            "remove the others"
        )
    if is_mounted_alone(path):
        raise InputError(
            f"the ledger {path} is mounted as a single file: {why}; mount the folder that holds it"
        )


def _with_tls(url: sa.URL) -> sa.URL:
    """Return the URL with `sslmode=require` if it names another machine. A mode that is stated is
    kept: it may ask for more."""
    query = url.normalized_query
    stated = "sslmode" in query or "service" in query or "PGSSLMODE" in os.environ
    named = [url.host or "", *query.get("host", ()), *query.get("hostaddr", ())]
    hosts = [host for hosts in named for host in hosts.split(",") if host]
    if stated or all(map(_is_local, hosts)):
        return url
    return url.update_query_dict({"sslmode": "require"})


def _is_local(host: str) -> bool:
    """Return whether a host, with or without a port, is a socket's folder or this machine."""
    name = re.sub(r":\d+$", "", host) if host.count(":") == 1 else host
    return name.startswith(("/", "@")) or name in ("localhost", "127.0.0.1", "::1", "[::1]")
