"""The command line's contract: names, exit codes, one line on stderr, no private text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

import dpray
from dpray.cli import app, load_command, run_command
from dpray.ledger.ledger import Ledger
from dpray.types import Budget

Settings = Callable[..., dict[str, Any]]

COMMANDS = {
    "dpray": "--version",
    "dpray audit": "--canaries --candidates --confidence --json --members --non-members --out "
    "--picture --trials config overrides",
    "dpray card": "--json --license --name --public --push-to-hub run_dir",
    "dpray check": "--json --write config overrides",
    "dpray demo": "--json --model --out",
    "dpray evaluate": "--after --attributes --delimiter --embedder --encoding --escape --floor "
    "--json --label --language --out --quote --real --records --schema --seeds --skip-rows "
    "--synthetic --text --train --turns --unit",
    "dpray init": "--about --dataset --delimiter --delta --encoding --epsilon --escape --force "
    "--json --label --label-about --labels --language --look --method --model --no-unit --out "
    "--output --public-size --quote --records --skip-rows --text --turns --unit --vocabulary -o "
    "file",
    "dpray ledger": "",
    "dpray ledger create": "--composition --dataset --delta --epsilon --json --ledger --order "
    "--unit",
    "dpray ledger export": "--json --ledger",
    "dpray ledger raise": "--dataset --delta --epsilon --json --ledger --reason",
    "dpray ledger show": "--html --json --ledger",
    "dpray ledger verify": "--contains --json --ledger",
    "dpray plan": "--compare --json --per-hour --rate-from --tokens-per-second --write config "
    "overrides",
    "dpray preview": "--json --records --write config overrides",
    "dpray rehearse": "--epsilon --json --method --out --public --records --write config overrides",
    "dpray report": "--json --no-public --public --records --review run_dir",
    "dpray run": "--json config overrides",
    "dpray serve": "--dry-run --json config overrides",
}
"""Other programs call these. What changes here is named in CHANGELOG.md."""


@pytest.fixture
def refuse(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must end with a code; returns its one line on stderr."""

    def run(code: int, *arguments: str) -> str:
        capfd.readouterr()
        assert run_command(list(arguments)) == code
        out, err = capfd.readouterr()
        assert "Marlowe" not in out + err
        assert err.startswith("dpray: ") and err.count("\n") == 1 and err.endswith("\n"), err
        return err

    return run


def options_of(command: Any, name: str) -> dict[str, str]:
    names = (option for each in command.params for option in each.opts + each.secondary_opts)
    found = {name: " ".join(sorted(names))}
    for key, child in getattr(command, "commands", {}).items():
        found |= options_of(load_command(key) if name == "dpray" else child, f"{name} {key}")
    return found


def test_commands_and_options_are_frozen() -> None:
    assert options_of(typer.main.get_command(app), "dpray") == COMMANDS


def test_every_command_answers_in_json_too() -> None:
    leaves = {name: options for name, options in COMMANDS.items() if name.count(" ")}
    del leaves["dpray ledger"]
    assert all("--json" in options.split() for options in leaves.values())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--version"]) == 0
    assert capsys.readouterr().out == f"{dpray.__version__}\n"


def test_plan_has_the_contracts_keys_and_opens_no_data(
    config_file: Callable[..., str], capsys: pytest.CaptureFixture[str], records_file: Path
) -> None:
    records_file.unlink()
    assert run_command(["plan", config_file(), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan.keys() >= {
        "epsilon", "delta", "neighboring_relation", "privacy_unit", "accountant", "mechanisms",
        "not_private", "method", "records", "llm_calls", "batches",
    }  # fmt: skip
    assert 0 < plan["epsilon"] <= 50.0 and plan["delta"] == 1e-5
    assert plan["neighboring_relation"] == "add_or_remove_one"
    assert plan["method"]["name"] == "private_prediction"
    for mechanism in plan["mechanisms"]:
        assert mechanism.keys() >= {"name", "parameters", "count", "cost"}


@pytest.mark.parametrize(
    ("unit", "words"),
    [(None, "add or remove one record"), ("who", "add or remove all records with the same 'who'")],
)
def test_a_plan_says_what_neighbours_differ_by(
    config_file: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    unit: str | None,
    words: str,
) -> None:
    assert run_command(["plan", config_file(data__unit=unit)]) == 0
    assert words in " ".join(capsys.readouterr().out.replace("│", " ").split())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"engine__model": "/no/such/folder"}, "engine.model"),
        ({"data__path": "/no/such/file.jsonl"}, "data.path"),
        ({"method__template": "no-such-template"}, "method.template"),
        ({"method__private_tokens": 10**6}, "method.private_tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_configuration_is_one_line_that_names_the_key(
    config_file: Callable[..., str],
    refuse: Callable[..., str],
    change: dict[str, Any],
    named: str,
    tmp_path: Path,
) -> None:
    assert named in refuse(2, "run", config_file(**change))
    assert not (tmp_path / "ledger.db").exists(), "nothing may be charged"


def test_a_configuration_that_is_not_there(refuse: Callable[..., str], tmp_path: Path) -> None:
    for command in ("run", "plan"):
        assert "none.yaml" in refuse(2, command, str(tmp_path / "none.yaml"))


BAD_LAST_LINE = {
    "not a text": (b'{"text": ["Marlowe"], "label": "a"}', "not a text"),
    "invalid UTF-8": (b'{"text": "Marlowe \xff\xfe", "label": "a"}', "UTF-8"),
    "too deep": (b'{"text": ' + b"[" * 20_000 + b"]" * 20_000 + b', "label": "a"}', "JSON"),
    "a huge number": (b'{"text": "Marlowe", "label": ' + b"9" * 5000 + b"}", "JSON"),
}


@pytest.mark.parametrize("what", BAD_LAST_LINE)
def test_bad_data_is_one_line_that_names_the_row(
    what: str,
    config_file: Callable[..., str],
    refuse: Callable[..., str],
    records_file: Path,
    tmp_path: Path,
) -> None:
    line, named = BAD_LAST_LINE[what]
    with open(records_file, "ab") as file:
        file.write(line + b"\n")
    message = refuse(2, "run", config_file())
    assert "records.jsonl, row 61" in message and named in message
    assert not (tmp_path / "out/synthetic.jsonl").exists()


def test_a_refused_budget(
    config_file: Callable[..., str],
    refuse: Callable[..., str],
    settings: Settings,
    records_file: Path,
    tmp_path: Path,
) -> None:
    ledger = Ledger.create_or_open(settings()["privacy"]["ledger"])
    ledger.create_dataset("notes", Budget(0.01, 1e-5), "record", "add_or_remove_one")
    # Rows that would be refused with 2: who answers with 3 has not read them.
    records_file.write_bytes(b"\xff Marlowe\n")
    message = refuse(3, "run", config_file())
    for word in ("asked (eps ", "spent (eps 0,", "left (eps 0.01,"):
        assert word in message
    account = ledger.account("notes")
    assert account is not None and account.spent.epsilon == 0


@pytest.mark.parametrize("words", ["run", "plan --loud", "dance", "ledger show"])
def test_wrong_options_are_bad_input(refuse: Callable[..., str], words: str) -> None:
    refuse(2, *words.split())


def test_without_a_command_the_help_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["ledger"]):
        assert run_command(arguments) == 2
        out, err = capfd.readouterr()
        assert "Usage:" in out and "dpray: " not in err


def test_an_unexpected_error_names_its_class_and_place_only(
    config_file: Callable[..., str],
    refuse: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> None:
        raise LookupError("Marlowe has a cough")

    monkeypatch.setattr("dpray.methods.registry.run", broken)
    message = refuse(1, "run", config_file())
    assert "LookupError at dpray:" in message
