"""`dpray ledger`: its options, its JSON and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner, Result

import dpray
from dpray.accounting.event import NEIGHBORING_RELATION
from dpray.accounting.events import DiscreteLaplace
from dpray.commands.ledger import app
from dpray.ledger.ledger import Ledger
from dpray.types import Budget, DprayError, InputError, MissingLedger


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/ledger.db"


def call(command: str, url: str, *options: str) -> Result:
    return CliRunner().invoke(app, [command, "--ledger", url, *options])


def create(url: str, *options: str) -> Result:
    arguments = ("--dataset", "clinic-notes", "--epsilon", "4", "--delta", "1e-6")
    return call("create", url, *arguments, *options)


def reserve(url: str) -> Ledger:
    ledger, stated_for = Ledger.open(url), ("record", NEIGHBORING_RELATION)
    charge = {"run-1": (DiscreteLaplace(1.0, 1), Budget(1.0, 1e-7))}
    ledger.reserve("clinic-notes", charge, *stated_for)
    return ledger


def spend(url: str, ledger: Ledger | None = None) -> None:
    ledger = ledger or reserve(url)
    ledger.begin("run-1", "attempt-1", ["a/0", "a/1"])
    ledger.publish("run-1", "attempt-1", [("a/0", "a" * 64)])


def test_create_and_show(url: str):
    assert create(url).exit_code == 0
    ledger = reserve(url)
    assert "none started" in call("show", url).stdout
    spend(url, ledger)
    shown = json.loads(call("show", url, "--json").stdout)
    assert set(shown) == {"ledger", "datasets"}
    (dataset,) = shown["datasets"]
    assert dataset["dataset"] == "clinic-notes"
    assert dataset["budget"] == {"epsilon": 4.0, "delta": 1e-6}
    assert dataset["spent"] == {"epsilon": 1.0, "delta": 1e-7}
    assert dataset["left"] == {"epsilon": 3.0, "delta": 9e-7}
    assert (dataset["privacy_unit"], dataset["composition"]) == ("record", "basic")
    (entry,) = dataset["entries"]
    assert entry["key"] == "run-1"
    assert entry["batches"]["published"] == 1
    readable = call("show", url).stdout
    for text in ("clinic-notes", "4 / 1e-06", "3 / 9e-07", "run-1", "1 of 2 published"):
        assert text in readable


def test_create_takes_a_rule_and_a_unit(url: str):
    rule = ("--composition", "renyi", "--order", "8", "--unit", "patient", "--json")
    created = create(url, *rule)
    assert json.loads(created.stdout)["order"] == 8.0
    (dataset,) = json.loads(call("show", url, "--json").stdout)["datasets"]
    assert dataset["composition"] == "renyi"
    assert dataset["order"] == 8.0
    assert dataset["privacy_unit"] == "all records with the same 'patient'"
    assert create(url, *rule).exit_code == 0
    assert isinstance(create(url).exception, InputError)


def test_a_ledger_in_a_folder_that_is_missing(tmp_path: Path):
    error = create(f"sqlite:///{tmp_path}/nowhere/ledger.db").exception
    assert isinstance(error, MissingLedger)
    assert str(error).endswith(f"cannot be made: there is no folder {tmp_path}/nowhere")


@pytest.mark.parametrize(
    "options",
    [
        ("--composition", "plain"),
        ("--order", "8"),
        ("--composition", "renyi", "--order", "1"),
        ("--epsilon", "nan"),
        ("--delta=-1e-6",),
    ],
    ids=" ".join,
)
def test_a_bad_budget_is_bad_input(url: str, options: tuple[str, ...]):
    error = create(url, *options).exception
    assert isinstance(error, DprayError)
    assert error.exit_code == 2
    assert "\n" not in str(error)


def test_another_budget_is_bad_input(url: str):
    create(url)
    error = create(url, "--epsilon", "5").exception
    assert isinstance(error, InputError)
    assert str(error) == (
        "data set 'clinic-notes' has another budget in the ledger already: (eps 4, delta 1e-06) "
        "per record, basic; `dpray ledger raise` makes it larger, on record"
    )


SHOW = """
import sys
from typer.testing import CliRunner
from dpray.commands.ledger import app
shown = CliRunner().invoke(app, ["show", "--ledger", sys.argv[1]])
heavy = {"torch", "sklearn", "ray", "opendp", "dp_accounting", "pandas", "pyarrow"}
heavy |= {"scipy.special", "scipy.stats", "scipy.optimize"}  # scipy alone takes milliseconds
print(shown.exit_code, sorted(heavy & set(sys.modules)))
"""


def test_show_reads_a_ledger_without_the_accountants_libraries(url: str):
    create(url)
    spend(url)
    shown = subprocess.run(
        [sys.executable, "-c", SHOW, url],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(dpray.__file__).parents[1])},
    )
    assert shown.stdout == "0 []\n", shown.stderr


def test_verify_says_what_does_not_fit(url: str):
    create(url)
    spend(url)
    assert call("verify", url).exit_code == 0
    assert json.loads(call("verify", url, "--json").stdout) == {"problems": []}
    with sa.create_engine(url).begin() as connection:
        connection.exec_driver_sql("DELETE FROM dpray_entries WHERE seq = 4")
    for options in ((), ("--json",)):
        result = call("verify", url, *options)
        assert "clinic-notes" in result.stdout
        assert isinstance(result.exception, InputError)
    assert len(json.loads(result.stdout)["problems"]) == 1


def test_export_gives_every_entry(url: str):
    create(url)
    spend(url)
    rows = [json.loads(line) for line in call("export", url).stdout.splitlines()]
    assert [row["kind"] for row in rows] == ["create", "reserve", "begin", "begin", "publish"]
    assert [row["prev_hash"] for row in rows[1:]] == [row["hash"] for row in rows[:-1]]


def test_show_before_the_first_run_is_one_line(url: str):
    error = call("show", url).exception
    assert isinstance(error, InputError) and "there is no ledger at" in str(error)
    assert "nothing was charged to it: the first run makes it" in str(error)
    assert "secret" not in str(call("show", "sqlite:///none.db").exception)
    create(url)
    assert call("show", url).stdout.rstrip().endswith("No run is charged yet.")


def test_show_writes_a_page(url: str, tmp_path: Path):
    create(url)
    spend(url)
    page = tmp_path / "budgets.html"
    assert call("show", url, "--html", str(page)).stdout == f"Written to {page}\n"
    assert "clinic-notes" in page.read_text(encoding="utf-8")
    assert json.loads(call("show", url, "--html", str(page), "--json").stdout) == {
        "html": str(page)
    }
    for bad in (tmp_path / "none" / "page.html", "s3://bucket/page.html"):
        assert isinstance(call("show", url, "--html", str(bad)).exception, InputError)
