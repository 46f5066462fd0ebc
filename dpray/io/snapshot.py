"""The rows of a database, copied once: `data.path` is its SQLAlchemy URL, `data.query` a SELECT.

A run reads its rows several times, in several processes and after a crash, and one charge pays for
one state of them. A table changes between two readings, and a SELECT without ORDER BY gives another
order. So the query is asked once, and its rows go to a file of JSON Lines that is read and hashed
like any other file. A row of JSON keeps what a database has and a table of Arrow has not: objects
with keys of their own in each row, and values of several types in one column, as SQLite has.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, time, timedelta
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import mkdtemp
from types import MappingProxyType
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from dpray.extras import require
from dpray.io.columns import looks_like_name
from dpray.io.files import NOT_IN_URLS, disk_is_full, holds_secret, make_private, write_durably
from dpray.types import InputError, did_you_mean

ROWS_FILE = "rows.jsonl"

ROWS_FETCHED = 1000
"""Rows that are fetched at once: memory does not grow with the table."""

PACKAGES = {
    "bigquery": "sqlalchemy-bigquery",
    "duckdb": "duckdb-engine",
    "mysql": "a driver such as pymysql, as in mysql+pymysql://",
    "snowflake": "snowflake-sqlalchemy",
}
"""The packages of some databases that SQLAlchemy does not know by itself."""

LONGEST_INTEGER = Decimal(10) ** 38


def open_database(url: str) -> sa.Engine:
    """Return the database of a `data.path`. Nothing is connected yet.

    Raises InputError for a URL with a secret, an unknown database and a missing package, and for a
    file of SQLite that is not there, which SQLite would make.
    """
    if holds_secret(url):
        raise InputError(
            f"data.path: {NOT_IN_URLS}, as PGPASSWORD or a service of PostgreSQL, or in a file "
            "that the database's package reads"
        )
    try:
        parsed = sa.make_url(url)
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        if parsed.drivername == "postgresql+psycopg":
            require("data.query on PostgreSQL", "psycopg")
        if parsed.get_backend_name() == "sqlite" and not os.path.isfile(parsed.database or ""):
            raise InputError(f"data.path: no such file: {parsed.database or 'sqlite://'}")
        return sa.create_engine(parsed, poolclass=sa.NullPool, hide_parameters=True)
    except (NoSuchModuleError, ImportError):
        kind = parsed.drivername.partition("+")[0]
        needed = PACKAGES.get(kind, "its package for SQLAlchemy")
        raise InputError(f"data.path: no package for {kind} is installed; add {needed}") from None
    except (ArgumentError, ValueError):  # without the cause, which may quote the URL
        raise InputError(
            "data.path: data.query takes a database, such as sqlite:///notes.db or "
            "postgresql://host/name"
        ) from None


def take_snapshot(
    url: str, query: str, folder: Path, needed: Mapping[str, str] = MappingProxyType({})
) -> Path:
    """Return the file in `folder` that has the query's rows, and make it if it is not there. Of
    another database or query it is made again. `needed` are columns that the rows have to have,
    with the keys that name them.

    The file is whole or absent, and for its owner only. The query runs in a transaction that is not
    committed, and on SQLite and PostgreSQL may only read. Raises InputError, whose words hold no
    value of a row and none of the query, and OSError for a full disk.
    """
    asked = folder / sha256(f"{url}\0{query}".encode()).hexdigest()[:16]
    file = asked / ROWS_FILE
    if file.exists():
        return file
    shutil.rmtree(folder, ignore_errors=True)
    engine = open_database(url)
    try:
        make_private(folder)
        make_private(asked)
        write_durably(file, _lines(engine, query, needed), private=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        engine.dispose()
    return file


def _lines(engine: sa.Engine, query: str, needed: Mapping[str, str]) -> Iterator[str]:
    """Yield the query's rows as lines of JSON, a few at a time from a cursor of the server's."""
    how = {"no_parameters": True, "stream_results": True, "yield_per": ROWS_FETCHED}
    # Others ignore this option.
    how["postgresql_readonly"] = True
    with _without_words(), engine.connect() as connection:
        if engine.name == "sqlite":  # whose driver commits a statement that it takes for a SELECT
            connection.exec_driver_sql("PRAGMA query_only = ON")
            connection.rollback()
        found = connection.execution_options(**how).exec_driver_sql(query)
        if not found.returns_rows:
            raise InputError("data.query: returns no rows; give a SELECT")
        names = [*found.keys()]
        if len({*names}) < len(names):
            raise InputError("data.query: two of its columns have one name; rename one by AS")
        _check_selected(names, needed)
        is_empty = True
        for row in found:
            is_empty = False
            values = {name: _value(each, name) for name, each in zip(names, row, strict=True)}
            yield json.dumps(values) + "\n"
        if is_empty:
            raise InputError("data.query: returns no rows")


def _check_selected(names: Sequence[str], needed: Mapping[str, str]) -> None:
    """Raise InputError for a column that the query does not have; `a.b` may be a field of `a`."""
    for column, key in needed.items():
        if column not in names and column.partition(".")[0] not in names:
            near = did_you_mean(column, filter(looks_like_name, names))
            raise InputError(f"data.query: does not select '{column}' ({key}){near}; add it there")


@contextmanager
def _without_words() -> Iterator[None]:
    """Raise a database's error by its name: its words quote values, and the query may hold some."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if disk_is_full(error):
            raise
        cause = getattr(error, "orig", None) or error
        code = getattr(cause, "sqlstate", None) or getattr(cause, "sqlite_errorname", None)
        name = type(cause).__name__ + (f", {code}" if code else "")
        is_query = isinstance(error, SQLAlchemyError) and getattr(error, "statement", None)
        key, what = ("data.query", "is refused") if is_query else ("data.path", "cannot be read")
        raise InputError(
            f"{key}: {what} by the database ({name}); its own client says why (its words are "
            "withheld: they may quote rows)"
        ) from None


def _value(value: object, column: str) -> Any:
    """Return a value as JSON has it. What JSON does not have becomes the text that a value of
    Parquet has in dpray. Raises InputError that names the column."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Decimal():
            return _number(value)
        case date() | time() | timedelta() | UUID():
            return str(value)
        case Mapping():
            return {str(key): _value(each, column) for key, each in value.items()}
        case list() | tuple():
            return [_value(each, column) for each in value]
    raise InputError(
        f"data.query: column '{column}' has values of the type {type(value).__name__}, which are "
        "no text; leave it out, or CAST it"
    )


def _number(value: Decimal) -> int | float | str | None:
    """Return an exact number: an integer, a float, or a text if a float would lose digits."""
    if not value.is_finite():
        return None
    if abs(value) < LONGEST_INTEGER and value == value.to_integral_value():
        return int(value)
    nearest = float(value)
    return nearest if math.isfinite(nearest) and Decimal(repr(nearest)) == value else str(value)


@contextmanager
def vanishing_folder(prefix: str) -> Iterator[Path]:
    """Yield a new folder, which another process removes when this one leaves it or ends."""
    folder = mkdtemp(prefix=prefix)
    wait = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"
    # In a session of its own: a signal to this one's processes does not reach it.
    with Popen([sys.executable, "-c", wait, folder], stdin=PIPE, start_new_session=True):
        yield Path(folder)
