from __future__ import annotations

import errno
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from ray.exceptions import RayTaskError
from sqlalchemy.exc import OperationalError

from dpray.io.files import disk_is_full


def test_a_full_disk_is_known_by_its_errors(tmp_path: Path) -> None:
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(OSError) as system:
        full.write(b"x")
    assert disk_is_full(system.value)
    assert disk_is_full(OSError(errno.EDQUOT, "quota"))

    with closing(sqlite3.connect(tmp_path / "a.db")) as database:
        database.execute("PRAGMA max_page_count = 1")
        with pytest.raises(sqlite3.OperationalError) as sqlite:
            database.execute("CREATE TABLE a (b)")
    assert disk_is_full(sqlite.value)

    with sa.create_engine(f"sqlite:///{tmp_path}/b.db").connect() as connection:
        connection.execute(sa.text("PRAGMA max_page_count = 1"))
        with pytest.raises(OperationalError) as wrapped:
            connection.execute(sa.text("CREATE TABLE a (b)"))
    assert disk_is_full(wrapped.value)

    outer = RuntimeError("while publishing")
    outer.__cause__ = system.value
    assert disk_is_full(outer)


def test_other_errors_are_no_full_disk() -> None:
    of_a_task = RayTaskError("f", "traceback", OSError(errno.ENOSPC, "full"))
    assert disk_is_full(of_a_task.as_instanceof_cause())
    assert not disk_is_full(OSError(errno.EACCES, "denied"))
    assert not disk_is_full(ValueError("no space left on device"))
    assert not disk_is_full(sqlite3.OperationalError("database is locked"))
