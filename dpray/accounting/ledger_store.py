"""The ledger's transactions, in SQLite (one machine) or PostgreSQL (a cluster).

A write is one transaction that is on disk before it returns, and no two writes to one data set run
side by side: in SQLite `BEGIN IMMEDIATE` lets one writer in, in PostgreSQL the data set's row is
locked (`Store.chain`).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.pool import NullPool, QueuePool

from dpray.accounting import ledger_schema
from dpray.accounting.hash_chain import Chain, Entry
from dpray.accounting.ledger_schema import datasets, entries, secret
from dpray.accounting.ledger_url import parse_url
from dpray.messages import first_line
from dpray.types import DprayError, InputError

SECONDS_TO_WAIT = 60
"""How long a writer waits for the others before it gives up."""

T = TypeVar("T")


class LedgerError(DprayError):
    """The ledger cannot be read or written now; whatever may have been charged stays charged."""


class MissingLedger(InputError):
    """There is no ledger at the URL."""


class Store:
    """The ledger's database. `create` makes the tables where they are missing; without it a missing
    ledger is a `MissingLedger`. An older version's tables are brought up to date."""

    def __init__(self, url: str, *, create: bool) -> None:
        self._url = parse_url(url)
        if create:
            if self._url.get_backend_name() == "sqlite":
                # For its owner alone; SQLite gives its journals the same rights. What is wrong with
                # the path, SQLite says below.
                with suppress(OSError):
                    os.close(os.open(str(self._url.database), os.O_CREAT | os.O_RDONLY, 0o600))
            self._make_tables(_engine(self._url, create=True))
        engine = _engine(self._url, create=False)
        self._writer = engine.execution_options(dpray_write=True)
        self._reader = (
            engine
            if self._url.get_backend_name() == "sqlite"
            else engine.execution_options(isolation_level="REPEATABLE READ")
        )
        if not create:
            self._check_tables()

    def __str__(self) -> str:
        return self._url.render_as_string(hide_password=True)

    def close(self) -> None:
        self._writer.dispose()

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """One snapshot of the ledger."""
        with self._errors(), self._reader.begin() as connection:
            yield connection

    def write(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` in one transaction and make it durable.

        Where another writer took a unique row first, `work` runs once more and meets that row.
        """
        with self._errors():
            try:
                with self._writer.begin() as connection:
                    return work(connection)
            except IntegrityError:
                with self._writer.begin() as connection:
                    return work(connection)

    def chain(self, connection: sa.Connection, dataset: str) -> Chain | None:
        """Lock a data set until the transaction ends and hand out the end of its chain; None where
        there is no such data set. Raises `LedgerError` where the chain's end is not what was
        written."""
        query = sa.select(datasets).where(datasets.c.name == dataset)
        row = connection.execute(query.with_for_update()).first()
        if row is None:
            return None
        last = connection.execute(
            sa.select(entries)
            .where(entries.c.dataset == dataset)
            .order_by(entries.c.seq.desc())
            .limit(1)
        ).first()
        entry = None if last is None else Entry(**last._mapping)
        if entry is None or (entry.seq + 1, entry.hash, entry.digest()) != (
            row.length,
            row.head,
            row.head,
        ):
            raise broken_chain(dataset)
        return Chain(dataset, row.length, row.head, row.reservations)

    def append(self, connection: sa.Connection, chain: Chain) -> None:
        """Write the chain's new entries and its new end."""
        if chain.added:
            connection.execute(sa.insert(entries), [vars(entry) for entry in chain.added])
            chain.added.clear()
            connection.execute(
                sa.update(datasets)
                .where(datasets.c.name == chain.dataset)
                .values(length=chain.length, head=chain.head, reservations=chain.reservations)
            )

    def digests(self, connection: sa.Connection, contents: Iterable[bytes]) -> list[str]:
        """Return HMAC-SHA256 of each content under the ledger's own key, in hexadecimal. The key
        leaves the database for this alone: an export confirms no guess of a file."""
        key = connection.execute(sa.select(secret.c.data_key)).scalar()
        if key is None:
            raise LedgerError(f"the ledger {self} has lost its key: nothing more is charged to it")
        own = bytes.fromhex(key)
        return [hmac.new(own, content, hashlib.sha256).hexdigest() for content in contents]

    def _make_tables(self, engine: sa.Engine) -> None:
        engine = engine.execution_options(dpray_write=True)
        with self._errors(making=True), engine.begin() as connection:
            ledger_schema.make(connection)
        engine.dispose()

    def _check_tables(self) -> None:
        with self.read() as connection:
            present = set(sa.inspect(connection).get_table_names())
        if not present >= ledger_schema.OLDEST:
            raise missing(self)
        if secret.name not in present:
            self._make_tables(self._writer)

    @contextmanager
    def _errors(self, *, making: bool = False) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            path = Path(self._url.database or "")
            if self._url.get_backend_name() == "sqlite" and not path.is_file():
                raise (self._not_made(path, error) if making else missing(self)) from error
            raise LedgerError(f"the ledger {self} failed: {_reason(error)}") from error

    def _not_made(self, path: Path, error: SQLAlchemyError) -> MissingLedger:
        folder = path.parent
        why = _reason(error) if folder.is_dir() else f"there is no folder {folder}"
        return MissingLedger(f"the ledger {self} cannot be made: {why}")


def missing(store: object) -> MissingLedger:
    return MissingLedger(
        f"there is no ledger at {store}: a missing ledger is refused, not made anew, because what "
        "was spent would be forgotten (`dpray ledger create` makes one)"
    )


def broken_chain(dataset: str) -> LedgerError:
    return LedgerError(
        f"the ledger's entries of '{dataset}' are not as they were written: nothing more is "
        "charged to it (see `dpray ledger verify`)"
    )


def _reason(error: SQLAlchemyError) -> str:
    """The database's own first line: no statement and no values."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    return first_line(cause)


def _engine(url: sa.URL, *, create: bool) -> sa.Engine:
    if url.get_backend_name() == "sqlite":
        return _sqlite_engine(url, create=create)
    engine = sa.create_engine(
        url,
        poolclass=QueuePool,
        pool_pre_ping=True,
        hide_parameters=True,
        connect_args={"connect_timeout": SECONDS_TO_WAIT},
    )
    sa.event.listen(engine, "connect", _prepare_postgresql)
    return engine


def _sqlite_engine(url: sa.URL, *, create: bool) -> sa.Engine:
    path = quote(str(url.database))
    mode = "rwc" if create else "rw"

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"file:{path}?mode={mode}",
            uri=True,
            timeout=SECONDS_TO_WAIT,
            isolation_level=None,
            check_same_thread=False,
        )
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        return connection

    # A connection a transaction: a kept one would go on writing into a file that was deleted.
    engine = sa.create_engine(
        "sqlite://", creator=connect, poolclass=NullPool, hide_parameters=True
    )
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _begin_sqlite(connection: sa.Connection) -> None:
    # A transaction that reads first and writes later could read what another one is replacing.
    writes = connection.get_execution_options().get("dpray_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _prepare_postgresql(connection: Any, _record: object) -> None:
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute(f"SET lock_timeout = '{SECONDS_TO_WAIT}s'")
        # A server may be set to answer before a commit is on disk; the ledger may not.
        cursor.execute(
            "SELECT set_config('synchronous_commit', 'on', false) "
            "WHERE current_setting('synchronous_commit') = 'off'"
        )
    connection.autocommit = False
