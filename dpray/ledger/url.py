"""The ledger's URL, checked: a place that keeps a file, or a database reached over TLS."""

from __future__ import annotations

import os
from collections.abc import Iterable
from ipaddress import ip_address
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError

from dpray.extras import require
from dpray.io.places import (
    MOUNTS,
    in_ray_package,
    is_mounted_alone,
    names_of_file,
    network_file_system,
)
from dpray.types import InputError


def parse_url(url: str, mounts: Path = MOUNTS) -> sa.URL:
    """Return the URL, checked, with its driver named, an SQLite path made absolute (the accountant
    actor has another working directory), and TLS asked for where PostgreSQL is elsewhere.

    Raises `InputError`, also for an SQLite file in a place that would lose it or its locks.
    """
    try:
        parsed = sa.make_url(url)
    except ArgumentError:
        raise InputError(
            "the ledger's URL has to look like sqlite:///ledger.db or postgresql://host/name"
        ) from None
    if parsed.drivername in ("sqlite", "sqlite+pysqlite"):
        if not parsed.database or parsed.database == ":memory:" or parsed.query:
            raise InputError("an SQLite ledger is a plain file: sqlite:///path/to/ledger.db")
        path = os.path.abspath(parsed.database)
        _check_place(path, mounts)
        return parsed.set(drivername="sqlite", database=path)
    if parsed.drivername in ("postgresql", "postgresql+psycopg"):
        require("a ledger on PostgreSQL", "psycopg")
        return _with_tls(parsed.set(drivername="postgresql+psycopg"))
    raise InputError(f"a ledger is SQLite or PostgreSQL, not {parsed.drivername}")


def _check_place(path: str, mounts: Path) -> None:
    if in_ray_package(path):
        raise InputError(
            f"the ledger {path} lies in a copy of a job's working directory, which Ray deletes, "
            "and what was spent with it: give postgresql://host/name, or an absolute path "
            "(sqlite:////folder/ledger.db) outside"
        )
    if (kind := network_file_system(path, mounts)) is not None:
        raise InputError(
            f"the ledger {path} lies on a network file system ({kind}), where SQLite's locks do "
            "not hold and two runs could spend one budget: give postgresql://host/name, or a "
            "path on a local disk"
        )
    check_one_name(path, mounts)


def check_one_name(path: str, mounts: Path = MOUNTS) -> None:
    """Raise `InputError` if an SQLite file can be reached by a second name: SQLite keeps its newest
    entries, and its locks, in files beside the name by which it was opened. Symbolic links are no
    second name, because SQLite follows them.

    Called in every transaction, since a name may be added while the ledger is open: whoever comes
    by the new name is refused, and so is whoever has the old one.
    """
    why = (
        "SQLite keeps the newest entries beside each name, so that one budget would be spent twice"
    )
    if (names := names_of_file(path)) > 1:
        raise InputError(
            f"the ledger {path} has {names} names (hard links): {why}; end every command that "
            "uses it, keep the name that has a `-wal` file beside it (any, if none has one), and "
            "remove the others"
        )
    if is_mounted_alone(path, mounts):
        raise InputError(
            f"the ledger {path} is mounted as a single file: {why}; mount the folder that holds it"
        )


def _with_tls(url: sa.URL) -> sa.URL:
    """Return the URL with `sslmode=require` where it leads to another machine. A mode that is
    stated, in the URL or where libpq looks for one, is kept: it may ask for more."""
    stated = {"sslmode", "service"} & set(url.query) or any(
        os.environ.get(name) for name in ("PGSSLMODE", "PGSERVICE")
    )
    if stated or all(_is_here(host) for host in _hosts(url)):
        return url
    return url.update_query_dict({"sslmode": "require"})


def _hosts(url: sa.URL) -> Iterable[str]:
    """Return the hosts that libpq will try, in the URL or, where it names none, in the
    environment."""
    named = [url.host] if url.host else []
    for key in ("host", "hostaddr"):
        values = url.query.get(key, ())
        named += [values] if isinstance(values, str) else values
    named = named or [os.environ.get(name, "") for name in ("PGHOSTADDR", "PGHOST")]
    return [host for hosts in named for host in hosts.split(",") if host]


def _is_here(host: str) -> bool:
    """Return whether a host is a socket's folder or this machine; it may carry a port, as
    SQLAlchemy writes it."""
    if host.startswith(("/", "@")) or host.rsplit(":", 1)[0] == "localhost":
        return True
    for form in (host, host.rsplit(":", 1)[0].strip("[]")):
        try:
            return ip_address(form).is_loopback
        except ValueError:
            continue
    return False
