"""Names and texts on the terminal: shown as they stand, obeyed by nobody."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dpray.cli import run_command
from dpray.commands.demo import _show_records
from dpray.commands.ledger import show_budgets
from dpray.commands.run import show_run
from dpray.runs.privacy_report import parse_report
from dpray.terminal import Terminal, printable
from tests.report.reports import a_report

NAMES = [
    "[/bold]", "[red]x[/]", "[link=http://x]y", ":smile:", "\x1b]0;title\x07", "a\x9b2Jb",
    "\u202etxt",
]  # fmt: skip
Settings = Callable[..., dict[str, Any]]


def told(capsys: pytest.CaptureFixture[str]) -> str:
    """Return what was printed, without line ends: rich breaks lines."""
    return capsys.readouterr().out.replace("\n", "")


def test_the_terminal_shows_strings_as_they_stand() -> None:
    for name in NAMES:
        terminal = Terminal()
        terminal.file = io.StringIO()
        terminal.print(name, highlight=False)
        terminal.note("note", "bold", name)
        shown = terminal.file.getvalue()
        assert shown.count(printable(name)) == 2
        assert not set("\x1b\x07\x9b\u202e") & set(shown)


@pytest.mark.parametrize("name", NAMES)
def test_a_runs_end(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = a_report()["ledger"] | {"dataset": name, "made_by_this_run": True}
    report = a_report(privacy_unit=name, ledger=ledger)
    show_run(parse_report(report), Path("out", name), Terminal())
    assert told(capsys).count(printable(name).rpartition("//")[2]) == 4


@pytest.mark.parametrize("name", NAMES)
def test_a_ledgers_tables(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    budget = {"epsilon": 1.0, "delta": 1e-6}
    accounts = {"budget": budget, "spent": budget, "left": budget}
    batches = {"published": 1, "started": 1, "failed": 0, "committed": True}
    run = {"key": name, "at": "2026-01-01T00:00"}
    dataset = accounts | {
        "dataset": name, "privacy_unit": name, "composition": "basic", "order": None,
        "raises": [{"at": "2026-07-01T12:00:00", "budget": budget, "reason": name}],
        "entries": [budget | run | {"batches": batches}],
    }  # fmt: skip
    show_budgets([dataset], Terminal())
    assert told(capsys).count(printable(name)) >= 4


def test_a_demos_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"text": f"{name} text", "label": name} for name in NAMES]
    written = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "synthetic.jsonl").write_text(written)
    _show_records(tmp_path, Terminal())
    shown = capsys.readouterr().out
    assert not set("\x1b\x07\x9b\u202e") & set(shown)
    for name in NAMES:
        assert f"{printable(name)}: {printable(name)} text" in shown
    assert (tmp_path / "synthetic.jsonl").read_text() == written


@pytest.mark.parametrize("name", ["[/bold]", "[red]x[/]", ":smile: [link=a]"])
def test_commands_with_hostile_names(
    name: str, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """plan, run's refusal, report, ledger verify and evaluate's refusal, with the name for the
    label, a file, a folder and the model."""
    folder = tmp_path / name
    folder.mkdir(parents=True)
    records = folder / "records.jsonl"
    records.write_text(json.dumps({"text": "x", "label": name}) + "\n")
    notes = folder / "notes.txt"
    notes.write_text("no rows\n")
    tree = settings(
        data__labels=[name, "b"],
        data__path=str(records),
        engine={"kind": "transformers", "model": name},
        privacy__ledger=f"sqlite:///{folder}/ledger.db",
        output__path=str(folder / "out"),
    )
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    codes = {
        ("plan", str(config)): 0,
        ("plan", str(config), "--json"): 0,
        ("run", str(config)): 2,
        ("report", str(folder)): 2,
        ("evaluate", "--real", str(records), "--synthetic", str(notes), "--out", str(folder)): 2,
        ("ledger", "show", "--ledger", tree["privacy"]["ledger"]): 0,
        ("ledger", "verify", "--ledger", tree["privacy"]["ledger"]): 0,
        ("ledger", "export", "--ledger", tree["privacy"]["ledger"]): 0,
    }
    create = ["ledger", "create", "--ledger", tree["privacy"]["ledger"], "--dataset", "notes"]
    assert run_command([*create, "--epsilon", "1", "--delta", "1e-6"]) == 0
    for arguments, code in codes.items():
        assert run_command(list(arguments)) == code, (arguments, capsys.readouterr().err)
    assert "unexpected" not in capsys.readouterr().err
