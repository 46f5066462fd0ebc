"""The rows of a database become a file once: as they are, and with no word of them elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.config.data import DataConfig
from dpray.evaluation.files import files_of
from dpray.io.snapshot import _value, open_database, take_snapshot
from dpray.types import InputError
from dpray.workers.rows import data_files, record_rows

Database = Callable[..., str]


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """Run statements, and return the URL of the database."""
    url = f"sqlite:///{tmp_path}/notes.db"
    if request.param == "postgresql":
        url = request.getfixturevalue("postgresql_url")
    (tmp_path / "notes.db").touch()
    engine = open_database(url)

    def execute(*statements: str) -> str:
        with engine.begin() as connection:
            for each in statements:
                connection.execution_options(no_parameters=True).exec_driver_sql(each)
        return url

    yield execute
    engine.dispose()


def rows_of(url: str, query: str, folder: Path) -> list[dict[str, Any]]:
    with take_snapshot(url, query, folder).open() as lines:
        return [json.loads(line) for line in lines]


def notes(*values: str) -> tuple[str, str]:
    rows = ", ".join(values)
    return "CREATE TABLE notes (n INTEGER, text TEXT)", f"INSERT INTO notes VALUES {rows}"


def test_a_snapshot_is_taken_once(database: Database, tmp_path: Path) -> None:
    url = database(*notes("(1, 'Marlowe')", "(2, NULL)", "(3, 'Götz says: 100 % :sure')"))
    query = "SELECT text, n FROM notes WHERE text LIKE '%' OR n = 2 ORDER BY n"
    folder, texts = tmp_path / "s", ("Marlowe", None, "Götz says: 100 % :sure")
    before = [{"text": text, "n": n} for n, text in enumerate(texts, start=1)]
    file = take_snapshot(url, query, folder)
    assert rows_of(url, query, folder) == before
    assert file.stat().st_mode & 0o077 == folder.stat().st_mode & 0o077 == 0
    database("UPDATE notes SET text = 'other'", "DELETE FROM notes WHERE n = 1")
    assert rows_of(url, query, folder) == before
    # Another query has other rows, and the old ones are gone.
    assert rows_of(url, f"{query} DESC", folder) == [{"text": "other", "n": n} for n in (3, 2)]
    assert not file.exists()


def test_a_query_changes_nothing(database: Database, tmp_path: Path) -> None:
    url = database(*notes("(1, 'a')"))
    with pytest.raises(InputError, match=r"^data\.query: "):
        take_snapshot(url, "DELETE FROM notes", tmp_path / "s")
    with suppress(InputError):  # a cursor of PostgreSQL takes no DELETE, and SQLite gives its rows
        take_snapshot(url, "DELETE FROM notes RETURNING n", tmp_path / "s")
    if url.startswith("postgresql"):
        database("CREATE SEQUENCE IF NOT EXISTS numbers")
    for query in (  # which SQLite's driver would commit, and PostgreSQL not roll back
        "WITH one AS (SELECT 1) DELETE FROM notes WHERE n IN one RETURNING n",
        "DROP TABLE notes",
        "SELECT nextval('numbers') AS n",
    ):
        with pytest.raises(InputError, match=r"^data\.query: is refused by the database"):
            take_snapshot(url, query, tmp_path / "s")
    assert rows_of(url, "SELECT text FROM notes", tmp_path / "s") == [{"text": "a"}]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        (
            "SELECT secret FROM notes",
            r"^data\.query: is refused by the database \(\w+, \w+\); .*they may quote rows\)$",
        ),
        ("SELECT text AS a, n AS a FROM notes", r"^data\.query: two of its columns have one name"),
        ("SELECT text FROM notes WHERE n > 9", r"^data\.query: returns no rows"),
        ("UPDATE notes SET n = 3", r"^data\.query: "),
        ("SELECT CAST(text AS {bytes}) AS b FROM notes", r"^data\.query: column 'b' has values of"),
    ],
)
def test_an_error_quotes_neither_query_nor_row(
    database: Database, tmp_path: Path, query: str, words: str
) -> None:
    url = database(*notes("(1, 'Marlowe')"))
    query = query.replace("{bytes}", "BYTEA" if url.startswith("postgresql") else "BLOB")
    with pytest.raises(InputError, match=words) as raised:
        take_snapshot(url, query, tmp_path / "s")
    assert "Marlowe" not in str(raised.value) and "secret" not in str(raised.value)
    assert raised.value.__suppress_context__ or raised.value.__context__ is None
    assert not (tmp_path / "s").exists()


def test_an_error_in_the_middle_leaves_nothing(database: Database, tmp_path: Path) -> None:
    """The cast of the last row fails, in PostgreSQL by an error that quotes it."""
    url = database(*notes("(1, '1')", "(2, 'Marlowe')"))
    query = "SELECT CAST(text AS INTEGER) AS n FROM notes ORDER BY notes.n"
    if url.startswith("sqlite"):  # which casts any text to 0
        query = "SELECT CASE n WHEN 1 THEN 1 ELSE json(text) END AS n FROM notes"
    with pytest.raises(InputError, match=r"^data\.(query|path): ") as raised:
        take_snapshot(url, query, tmp_path / "s")
    assert "Marlowe" not in str(raised.value)
    assert not (tmp_path / "s").exists()


def test_a_column_that_the_query_does_not_select_is_named_once_by_its_key(
    database: Database, tmp_path: Path
) -> None:
    url, query = database(*notes("(1, 'Marlowe')")), "SELECT text, n AS labels FROM notes"
    data = DataConfig(
        path=url, query=query, text="text", label="label", labels=("a",), public_size=9
    )
    words = (
        r"^data\.query: does not select 'label' \(data\.label\) \(did you mean 'labels'\?\); add"
    )
    with pytest.raises(InputError, match=words), files_of(data):
        pass
    nested = data.model_copy(update={"label": "labels", "unit": "text.author"})
    with files_of(nested) as read:
        assert Path(read.path).exists()
    with pytest.raises(InputError, match=r"'other.x' \(data\.attributes\)"):
        take_snapshot(url, query, tmp_path / "s", {"other.x": "data.attributes"})
    assert not (tmp_path / "s").exists()


def test_every_column_has_a_key_that_names_it() -> None:
    data = DataConfig(
        path="a.jsonl", text=("a", "b"), label="c", labels=(1,), label_proportions="measured",
        unit="d", after="e > 5", attributes={"f": (1, 2)}, public_size=9,
    )  # fmt: skip
    keys = [data.column_keys[column] for column in "abcdef"]
    others = ["label", "unit", "after", "attributes"]
    assert keys == ["data.text", "data.text", *(f"data.{key}" for key in others)]
    assert data.columns == frozenset("abcdef")


@pytest.mark.slow
def test_types_of_postgresql(postgresql_url: str, tmp_path: Path) -> None:
    query = """SELECT 12.50::numeric AS price, 7::numeric AS whole, 'NaN'::float8 AS nan,
        0.1::float8 AS tenth, 9007199254740993 AS large, true AS yes, NULL AS nothing,
        '2026-09-30'::date AS day, '2026-09-30 08:00+02'::timestamptz AT TIME ZONE 'UTC' AS moment,
        '{"turns": [{"role": "user"}], "x": 1}'::jsonb AS object, ARRAY['a', NULL] AS list,
        '6a2f41a3-c54c-fce8-32d2-0324e1c32e22'::uuid AS id,
        123456789012345678.123456789::numeric AS exact"""
    [row] = rows_of(postgresql_url, query, tmp_path)
    assert row == {
        "price": 12.5, "whole": 7, "nan": None, "tenth": 0.1, "large": 9007199254740993,
        "yes": True, "nothing": None, "day": "2026-09-30", "moment": "2026-09-30 06:00:00",
        "object": {"turns": [{"role": "user"}], "x": 1}, "list": ["a", None],
        "id": "6a2f41a3-c54c-fce8-32d2-0324e1c32e22", "exact": "123456789012345678.123456789",
    }  # fmt: skip
    assert type(row["whole"]) is int and row["yes"] is True


@given(st.decimals(allow_nan=False, allow_infinity=False))
def test_a_decimal_loses_no_digit(number: Decimal) -> None:
    found = _value(number, "n")
    assert Decimal(repr(found) if isinstance(found, float) else found) == number


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (datetime(2026, 9, 30, 8, tzinfo=UTC), "2026-09-30 08:00:00+00:00"),
        (date(2026, 9, 30), "2026-09-30"), (UUID(int=7), str(UUID(int=7))),
        (Decimal("NaN"), None), (float("inf"), None), ({1: (Decimal("2.0"),)}, {"1": [2]}),
    ],
)  # fmt: skip
def test_other_values_are_as_those_of_parquet(value: object, found: object) -> None:
    assert _value(value, "n") == found


def test_rows_are_read_like_those_of_a_file(database: Database, tmp_path: Path) -> None:
    """One row with a list in it is no export with its rows in a list."""
    url = database("CREATE TABLE t (a TEXT)", "INSERT INTO t VALUES ('[1]')")
    query = "SELECT 'hello' AS text"
    if url.startswith("postgresql"):
        query += ", ARRAY[1, 2] AS list"
    data = DataConfig(path=url, query=query, public_size=9)
    [part] = data_files(data.copied_to(take_snapshot(url, query, tmp_path / "s")))
    assert [row["text"] for row in record_rows(part, data)] == ["hello"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://me:hunter2@host/db", r"has no place in it; give it in the environment"),
        ("postgresql://host/db?password=hunter2", r"has no place in it"),
        ("mysql://host/db?user=me&pwd=hunter2", r"has no place in it"),
        ("mssql+pyodbc:///?odbc_connect=PWD%3Dhunter2", r"has no place in it"),
        ("sqlite:///hunter2/none.db", r"no such file: hunter2/none\.db"),
        ("notes.csv", r"data\.query takes a database"),
        ("s3://bucket/hunter2.csv", r"no package for s3 is installed"),
        ("bigquery://project", r"no package for bigquery is installed; add sqlalchemy-bigquery"),
        ("snowflake://account", r"add snowflake-sqlalchemy"),
    ],
)
def test_what_is_no_database_is_refused(url: str, words: str) -> None:
    with pytest.raises(InputError, match=rf"^data\.path: .*{words}") as raised:
        open_database(url)
    assert ":hunter2" not in str(raised.value) and "=hunter2" not in str(raised.value)


def test_a_database_takes_no_key_of_files() -> None:
    with pytest.raises(ValueError, match=r"query: the rows of a database take no encoding"):
        DataConfig(path="sqlite:///a.db", query="SELECT 1", public_size=9, encoding="cp1252")


def test_a_database_that_is_away_is_named_by_its_key(tmp_path: Path) -> None:
    url = f"postgresql://me@/db?host={tmp_path}"
    with pytest.raises(InputError, match=r"^data\.path: cannot be read by the database \(Oper"):
        take_snapshot(url, "SELECT 1", tmp_path / "s")


MEMORY = """
import resource, sys
from pathlib import Path
from dpray.io.snapshot import take_snapshot
def most():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
query = "SELECT repeat('x', 2000) AS text FROM generate_series(1, {})"
take_snapshot(sys.argv[1], query.format(2000), Path(sys.argv[2]) / "small")
before = most()
file = take_snapshot(sys.argv[1], query.format(30_000), Path(sys.argv[2]) / "large")
assert file.stat().st_size > 60_000_000
print((most() - before) // 1024)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_table(postgresql_url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEMORY, postgresql_url, str(tmp_path)]
    grown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert int(grown.stdout) < 30  # MiB; 60 are read
