"""`Store` keeps the ledger's tables in SQLite (one machine) or PostgreSQL (a cluster).

A write is in a transaction that is on disk before it returns, and no two transactions that write
to one data set run side by side: in SQLite `BEGIN IMMEDIATE` lets one writer in, in PostgreSQL the
data set's row is locked (`Transaction.lock`). So transactions are serialisable without the repeats
that PostgreSQL's own level of that name asks for: what they read beside locked data sets never
changes (a data set's first entry, the place of a reservation), and unique indices guard the rest.
"""

from __future__ import annotations

import hashlib
import hmac
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import NullPool, QueuePool

from dpray.io.files import disk_is_full, touch_private
from dpray.ledger.schema import NEWEST, UnknownTables, revision, secret, upgrade
from dpray.ledger.url import check_one_name, parse_url
from dpray.types import DprayError, InputError, Resumable, first_line

SECONDS_TO_WAIT = 60
"""A writer waits so long for the others before it gives up."""

TCP = {
    "connect_timeout": SECONDS_TO_WAIT,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 1000 * SECONDS_TO_WAIT,
}
"""libpq's keys, in seconds but for the last, in milliseconds: a server that is gone without a word
is noticed within a minute. What the URL says instead is kept."""

PASSING = frozenset({"40001", "40P01", "57P01", "57P02", "57P03"})
"""PostgreSQL's states of: a serialization failure, a deadlock, a server that shuts down, crashed,
or starts up."""


class LedgerError(DprayError):
    """The ledger cannot be read or written now; whatever may have been charged stays charged."""


class LedgerUnavailable(LedgerError):
    """The database fails now; later the same operation may succeed."""


class LedgerFull(LedgerUnavailable, Resumable):
    """No space is left on the disk of the ledger."""


class LedgerConflict(LedgerError):
    """The ledger has the key already, for something else."""


class MissingLedger(InputError):
    """There is no ledger at the URL."""


class Store:
    """Opens the ledger's database. `create` makes a ledger that is missing; without it that is a
    `MissingLedger`. An older version's tables are brought up to date; tables that are not known are
    a `LedgerError`."""

    def __init__(self, url: str, *, create: bool) -> None:
        self._url = parse_url(url)
        self._is_sqlite = self._url.get_backend_name() == "sqlite"
        if create:
            if self._is_sqlite:
                touch_private(str(self._url.database))
            maker = self._engine(create=True)
            try:
                self._bring_up_to_date(maker, create=True)
            finally:
                maker.dispose()
        engine = self._engine(create=False)
        self._writer = engine.execution_options(dpray_write=True)
        snapshot = {} if self._is_sqlite else {"isolation_level": "REPEATABLE READ"}
        self._reader = engine.execution_options(**snapshot)
        self._held: sa.Connection | None = None
        if not create:
            self._bring_up_to_date(engine, create=False)

    def __str__(self) -> str:
        return self._url.render_as_string(hide_password=True)

    def close(self) -> None:
        self.rest()
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
            if not self._is_sqlite:
                # A process that was stopped while it held its locks does not hold them for good.
                wait = f"{2 * SECONDS_TO_WAIT}s"
                connection.exec_driver_sql(
                    f"SET LOCAL idle_in_transaction_session_timeout = '{wait}'"
                )
            yield connection

    def rest(self) -> None:
        """Give up the connection that `begin` holds between writes; call it once no write waits.

        When SQLite's last connection is closed, the write-ahead log is copied into the database,
        which takes longer than a commit. An idle connection puts that off while writes follow each
        other; after them the file is the whole ledger, as it is after a single write."""
        if self._held is not None:
            held, self._held = self._held, None
            held.close()

    def digests(self, connection: sa.Connection, contents: Iterable[bytes]) -> list[str]:
        """Return HMAC-SHA256 of each content under the ledger's own key, in hexadecimal. The key
        leaves the database for this alone: an export confirms no guess of a file."""
        key = connection.execute(sa.select(secret.c.data_key)).scalar()
        if key is None:
            raise LedgerError(f"the ledger {self} has lost its key: nothing more is charged to it")
        own = bytes.fromhex(key)
        return [hmac.new(own, content, hashlib.sha256).hexdigest() for content in contents]

    def _bring_up_to_date(self, engine: sa.Engine, *, create: bool) -> None:
        with self._errors(making=create), engine.begin() as connection:
            present = revision(connection)
        if present is None and not create:
            raise self._missing()
        if present != NEWEST:
            writer = engine.execution_options(dpray_write=True)
            with self._errors(making=create), writer.begin() as connection:
                upgrade(connection)

    @contextmanager
    def _errors(self, *, making: bool = False) -> Iterator[None]:
        try:
            yield
        except UnknownTables as error:
            raise LedgerError(f"the ledger {self} {error}") from None
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

    def _engine(self, *, create: bool) -> sa.Engine:
        if self._is_sqlite:
            return _sqlite_engine(str(self._url.database), "rwc" if create else "rw")
        engine = sa.create_engine(
            self._url,
            poolclass=QueuePool,
            pool_pre_ping=True,
            hide_parameters=True,
            connect_args={k: v for k, v in TCP.items() if k not in self._url.query},
        )
        sa.event.listen(engine, "connect", _prepare_postgresql)
        return engine


def is_passing(error: BaseException) -> bool:
    """Return whether a transaction that ended so may succeed when it is made again: another one
    took a unique row first or waited for this one, or the connection or the server was lost."""
    if isinstance(error, IntegrityError):
        return True
    # SQLite's errors have no such attribute. Without a state, libpq had no answer from the server.
    if not isinstance(error, OperationalError) or not hasattr(error.orig, "sqlstate"):
        return False
    state: str | None = getattr(error.orig, "sqlstate", None)
    return state is None or state.startswith("08") or state in PASSING


def broken_chain(dataset: str) -> LedgerError:
    return LedgerError(
        f"the ledger's entries of '{dataset}' are not as they were written: nothing more is "
        "charged to it (see `dpray ledger verify`)"
    )


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
