"""A run and its ledger: the data set's name, its files, and the run's place in the chain. By
DP-KPS, which runs two mechanisms and needs no model."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpray.cli import run_command
from dpray.config.config import Config
from dpray.ledger.chain import Chain, nearly
from dpray.ledger.ledger import Ledger
from dpray.ledger.transaction import Transaction
from dpray.methods import registry as methods
from dpray.methods.config import parse_config
from dpray.runs import runner
from dpray.types import Budget, BudgetRefused, DprayError, InputError, Resumable
from tests.integration.opened import Opened

SQLITE = pytest.mark.parametrize("url", ["sqlite"], indirect=True)


@pytest.fixture
def ledger(url: str) -> Ledger:
    """One with room for many runs on "notes"."""
    ledger = Ledger.create_or_open(url)
    ledger.create_dataset("notes", Budget(100, 1e-3), "record", "add_or_remove_one")
    return ledger


def elsewhere(tmp_path: Path, name: str, **changes: Any) -> dict[str, Any]:
    return {"output__path": str(tmp_path / name)} | changes


def kinds(ledger: Ledger) -> list[str]:
    return [row["kind"] for row in ledger.export()]


@pytest.mark.parametrize("address", ["none", None], ids=["here", "on Ray"])
def test_a_run_that_is_refused_loads_no_model(
    settings: Callable[..., dict[str, Any]], ledger: Ledger, url: str, address: str | None
):
    ledger.create_dataset("small", Budget(0.01, 1e-9), "record", "add_or_remove_one")
    before, said = list(ledger.export()), []
    refusals: list[tuple[dict[str, Any], type[DprayError]]] = [
        ({"privacy__dataset": "nots"}, InputError),
        ({"privacy__dataset": "small"}, BudgetRefused),
        ({"data__unit": "text"}, InputError),
        ({"data__text": "txet"}, InputError),
        ({"data__path": "no-such.jsonl"}, InputError),
    ]
    for changes, refused in refusals:
        tree = settings(**{"privacy__ledger": url, "runtime__ray_address": address} | changes)
        with pytest.raises(refused):
            methods.run(
                parse_config(tree), said.append, build=lambda *_, **__: pytest.fail("loaded")
            )
        assert list(ledger.export()) == before
    assert "starting Ray" not in {progress.activity for progress in said}


@SQLITE
@pytest.mark.usefixtures("ledger")
def test_a_run_of_another_plan_loads_no_model(
    config: Callable[..., Config], settings: Callable[..., dict[str, Any]], url: str
):
    methods.run(config())
    other = parse_config(settings(privacy__ledger=url))
    with pytest.raises(InputError, match="holds a finished run of another plan"):
        methods.run(other, build=lambda *_, **__: pytest.fail("loaded"))


def command_of(error: DprayError) -> list[str]:
    """Return the words of the command that an error names."""
    line = re.search(r"dpray (ledger .*?)(?=; nothing was|$)", str(error))
    assert line is not None
    return [word.replace("TEXT", "more data came in") for word in shlex.split(line[1])]


def test_a_name_that_is_probably_mistyped_is_refused_with_both_ways_on(
    config: Callable[..., Config], ledger: Ledger
):
    for name in ("nots", "Note-s", "noets"):
        with pytest.raises(
            InputError, match=r"^privacy\.dataset: .*; did you mean 'notes'\? "
        ) as refused:
            methods.run(config(privacy__dataset=name))
    assert kinds(ledger) == ["create"]
    assert run_command(command_of(refused.value)) == 0
    assert methods.run(config(privacy__dataset="noets"))["records"] == 8
    assert ledger.verify() == []


def test_another_data_set_gets_its_budget_in_a_file_and_not_in_a_shared_database(
    config: Callable[..., Config], ledger: Ledger, tmp_path: Path, url: str
):
    name = "notes 2"
    assert [nearly(each, ["notes"]) for each in ("letters", name, "2026 notes", "n")] == [None] * 4
    new = config(privacy__dataset=name, privacy__epsilon=9.0)
    if not url.startswith("sqlite"):
        with pytest.raises(InputError, match="it has 'notes'; to make one: ") as refused:
            methods.run(new)
        assert run_command(command_of(refused.value)) == 0
    found = methods.run(new)["ledger"]
    assert found["dataset"] == name
    assert found["budget"] == {"epsilon": 9.0, "delta": 1e-5}
    assert found["made_by_this_run"] is False
    assert found["budget_by_this_run"] is url.startswith("sqlite")
    # The same records have this one budget, whatever name is tried next.
    again = elsewhere(tmp_path, "again", privacy__dataset="other")
    with pytest.raises(InputError, match=f"as '{name}'|no data set 'other'"):
        methods.run(config(**again))
    assert "other" not in ledger.names()
    assert ledger.verify() == []


def test_a_second_run_of_the_same_configuration_follows_the_way_on(
    config: Callable[..., Config], tmp_path: Path, url: str
):
    """The first run spends its delta and little of its epsilon: then delta is what refuses."""
    Ledger.create_or_open(url)
    cheap = {"method__epsilon_vocabulary": 0.5, "method__epsilon_kde": 0.5}
    first = config(**cheap)
    if not url.startswith("sqlite"):
        with pytest.raises(InputError) as unknown:
            methods.run(first)
        assert run_command(command_of(unknown.value)) == 0
    assert methods.run(first)["ledger"]["left"]["delta"] == 0
    second = config(**elsewhere(tmp_path, "second", **cheap))
    with pytest.raises(BudgetRefused) as refused:
        methods.run(second)
    assert "--epsilon 8 --delta 2e-05 --reason TEXT" in str(refused.value)
    assert run_command(command_of(refused.value)) == 0
    report = methods.run(second)
    assert report["ledger"]["budget"] == {"epsilon": 8.0, "delta": 2e-5}
    [shown] = Ledger.open(url).show()["datasets"]
    assert [each["reason"] for each in shown["raises"]] == ["more data came in"]
    assert Ledger.open(url).verify() == []


@SQLITE
def test_a_mistyped_column_is_told_before_the_charge(config: Callable[..., Config], tmp_path: Path):
    """Nor is there a ledger yet, whose account would be that of the mistyped column's units."""
    for key in ("text", "label", "unit"):
        with pytest.raises(InputError, match=r"records\.jsonl, .*1.*'txet'"):
            methods.run(config(**{f"data__{key}": "txet"}))
    assert not (tmp_path / "ledger.db").exists()
    assert methods.run(config())["records"] > 0


@SQLITE
def test_a_run_that_made_its_ledger_and_was_cut_off_goes_on(
    config: Callable[..., Config], url: str, monkeypatch: pytest.MonkeyPatch
):
    """It is cut off before it makes the data set, which it does with the charge."""

    def stop(*_: Any, **__: Any) -> None:
        raise DprayError("cut off")

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "reserve", stop)
        with pytest.raises(DprayError, match="cut off"):
            methods.run(config())
    assert Ledger.open(url).names() == []
    report = methods.run(config())
    assert report["ledger"]["made_by_this_run"] is True
    assert report["ledger"]["budget_by_this_run"] is True
    assert report["ledger"]["budget"] == {"epsilon": 8.0, "delta": 1e-5}
    assert report["ledger"]["spent"]["epsilon"] == report["epsilon"]


@SQLITE
def test_the_same_file_under_another_name_is_refused_and_charged_nothing(
    config: Callable[..., Config], ledger: Ledger, tmp_path: Path, records_file: Path
):
    ledger.create_dataset("other", Budget(100, 1e-3), "record", "add_or_remove_one")
    methods.run(config())
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(records_file.read_bytes())
    again = elsewhere(tmp_path, "again", privacy__dataset="other", data__path=str(copy))
    before = list(ledger.export())
    with pytest.raises(InputError, match=r"^privacy\.dataset: .* as 'notes'") as refused:
        methods.run(config(**again))
    assert "Marlowe" not in str(refused.value)
    assert list(ledger.export()) == before
    # Other records have a budget of their own; and "notes" may have any number of files.
    copy.write_text(records_file.read_text().replace("Marlowe 7", "Marlowe seven"))
    methods.run(config(**again))
    records_file.write_text(records_file.read_text().replace("Marlowe 8", "Marlowe eight"))
    methods.run(config(**elsewhere(tmp_path, "more")))
    assert kinds(ledger).count("data") == 3
    assert ledger.verify() == []


@SQLITE
def test_a_refused_budget_leaves_the_data_closed(
    config: Callable[..., Config], url: str, records_file: Path
):
    Ledger.create_or_open(url).create_dataset(
        "notes", Budget(7.9, 1e-5), "record", "add_or_remove_one"
    )
    with Opened([records_file]) as opened:
        with pytest.raises(BudgetRefused):
            methods.run(config())
        assert opened.flags() == [False]


@SQLITE
def test_a_run_that_began_reads_the_records_and_the_names_that_it_began_with(
    config: Callable[..., Config], cut_off: Callable[..., None], ledger: Ledger, records_file: Path
):
    run = config()
    cut_off(run, "VocabularyShard")
    kept = Path(run.output.path) / "private" / runner.DATA_FINGERPRINT
    kept.unlink()  # nothing has begun: it is written again
    cut_off(run, "total_sums")
    fingerprint, before = kept.read_text(), records_file.read_text()
    other = before.replace("Marlowe 7", "Marlowe seven")
    records_file.write_text(other)
    with pytest.raises(InputError, match="the records have changed"):
        methods.run(run)
    assert kinds(ledger).count("data") == 1
    kept.unlink()
    for records in (other, before):
        records_file.write_text(records)
        with pytest.raises(InputError, match=r"data\.sha256 is missing"):
            methods.run(run)
        assert not kept.exists()
    kept.write_text(fingerprint)
    # A version to which 101.0 was not 101: a unit would fall into two batches.
    file = Path(run.output.path) / "run.json"
    now = file.read_text()
    file.write_text(json.dumps({k: v for k, v in json.loads(now).items() if k != "format"}))
    with pytest.raises(InputError, match=r"would draw other batches or publish under other names"):
        methods.run(run)
    file.write_text(now)
    assert methods.run(run)["records"] == 8


@SQLITE
def test_a_report_names_the_runs_last_entry(
    config: Callable[..., Config], ledger: Ledger, url: str, tmp_path: Path
):
    first = methods.run(config())
    methods.run(config(**elsewhere(tmp_path, "second")))
    rows = {row["seq"]: row for row in ledger.export()}
    place = first["ledger"]
    assert rows[place["sequence"]]["hash"] == place["head"]
    own = [seq for seq, row in rows.items() if row["key"].startswith(place["reservation"])]
    assert place["sequence"] == max(own)
    runs = [str(tmp_path / name) for name in ("out", "second")]
    contains = [option for run in runs for option in ("--contains", run)]
    assert run_command(["ledger", "verify", "--ledger", url, *contains]) == 0


@SQLITE
def test_a_run_cut_off_between_its_last_entry_and_its_report_goes_on(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, ledger: Ledger
):
    run, write = config(), runner.ReleaseFolder.write_json

    def crash(folder: Any, name: str, value: Any) -> None:
        if name == "privacy_report.json":
            raise OSError(28, "No space left on device")
        write(folder, name, value)

    with monkeypatch.context() as patch:
        patch.setattr(runner.ReleaseFolder, "write_json", crash)
        with pytest.raises(Resumable, match=r"no space is left.*the same command goes on"):
            methods.run(run)
    assert kinds(ledger).count("commit") == 1
    report = methods.run(run)
    assert kinds(ledger).count("commit") == 1
    assert report == json.loads((Path(run.output.path) / "privacy_report.json").read_text())
    assert ledger.verify() == []


@SQLITE
@pytest.mark.usefixtures("ledger")
def test_a_charge_passes_ten_functions(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the command's function to the entry's: docs/architecture.md walks through them."""
    ways: list[list[str]] = []
    add = Transaction.add

    def walked(self: Transaction, chain: Chain, account: Any = None) -> None:
        package = str(Path(runner.__file__).parents[1])
        frames = [each.function for each in inspect.stack() if each.filename.startswith(package)]
        if chain.added[-1].kind in ("reserve", "data"):
            ways.append(frames[::-1])
        add(self, chain, account)

    monkeypatch.setattr(Transaction, "add", walked)
    methods.run(config())
    [way] = [way for way in ways if "execute" in way]
    assert len([*way, "add"]) <= 10, way
