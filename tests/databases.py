"""Ledgers to test with: SQLite always, a real PostgreSQL where its binaries are installed."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from dpray.ledger.store import parse_url

BINARIES = ("initdb", "pg_ctl")


def _find_binaries() -> dict[str, str] | None:
    found = {name: shutil.which(name) for name in BINARIES}
    if all(found.values()):
        return {name: str(path) for name, path in found.items()}
    for folder in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True):
        if all((folder / name).exists() for name in BINARIES):
            return {name: str(folder / name) for name in BINARIES}
    return None


@pytest.fixture(scope="session")
def postgresql_socket() -> Iterator[str]:
    """The socket folder of a PostgreSQL server of the tests' own."""
    if _find_binaries() is None:
        pytest.skip("PostgreSQL's initdb and pg_ctl are not installed")
    # Off on purpose: the ledger has to turn the waiting for its commits on again by itself.
    with postgresql_server("-c fsync=off -c synchronous_commit=off") as folder:
        yield folder


@contextmanager
def postgresql_server(options: str = "") -> Iterator[str]:
    """Run a server of our own and yield the folder of its socket."""
    binaries = _find_binaries()
    assert binaries is not None
    # PostgreSQL refuses to run as root, and a socket's path has to be short.
    user = "postgres" if os.getuid() == 0 else pwd.getpwuid(os.getuid()).pw_name
    folder = tempfile.mkdtemp(prefix="dpray-pg-")
    shutil.chown(folder, user)

    def run(name: str, *arguments: str) -> None:
        command = [binaries[name], *arguments]
        as_user = {"user": user} if os.getuid() == 0 else {}
        subprocess.run(
            command, cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=120, **as_user
        )

    data = f"{folder}/data"
    run("initdb", "-D", data, "-U", "postgres", "-A", "trust", "--no-sync")
    options = f"-c listen_addresses='' -k {folder} {options}"
    run("pg_ctl", "-D", data, "-l", f"{folder}/log", "-w", "-o", options, "start")
    try:
        yield folder
    finally:
        run("pg_ctl", "-D", data, "-m", "immediate", "stop")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgresql_url(postgresql_socket: str) -> str:
    """A schema of the test's own."""
    return new_schema(postgresql_socket)


def new_schema(postgresql_socket: str) -> str:
    """Return the URL of a schema in which nothing is yet."""
    import psycopg  # late: tests on a GPU machine without a registry have no database

    schema = f"ledger_{uuid.uuid4().hex}"
    address = f"postgresql://postgres@/postgres?host={postgresql_socket}"
    with psycopg.connect(address) as connection:
        connection.execute(f"CREATE SCHEMA {schema}")
    return f"{address}&options=-csearch_path%3D{schema}"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a ledger that may be made; nothing is there yet."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.db"
    found: str = request.getfixturevalue("postgresql_url")
    return found


@pytest.fixture
def connection(url: str) -> Iterator[Callable[[], AbstractContextManager[sa.Connection]]]:
    """Transactions behind the ledger's back."""
    engine = sa.create_engine(parse_url(url), poolclass=sa.NullPool)
    yield engine.begin
    engine.dispose()
