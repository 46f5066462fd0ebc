"""Hostile configurations, names, texts and files: exit 2 with one line, or no effect at all."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import yaml

from dpray.cli import run_command
from dpray.io.file_list import list_files
from dpray.io.formats import FilePart
from dpray.io.records import read_rows
from dpray.methods.config import load_config, parse_config
from dpray.runs.folder import ReleaseFolder
from dpray.types import InputError
from dpray.workers.rows import record_rows

Settings = Callable[..., dict[str, Any]]
Refuse = Callable[..., str]

NESTED = "[" * 20_000
DEEP = NESTED + "]" * 20_000
BRACKETS = "[red][/bold] [link=http://x]"


@pytest.fixture
def refuse(capfd: pytest.CaptureFixture[str]) -> Refuse:
    """Run a command that ends with exit code 2 and one line on stderr, which is returned."""

    def run(*arguments: str) -> str:
        capfd.readouterr()
        assert run_command(list(arguments)) == 2
        out, err = capfd.readouterr()
        assert out == "" and err.startswith("dpray: ") and err.count("\n") == 1 and len(err) < 2000
        assert err.strip("\n").isprintable()
        return err

    return run


INTERPOLATIONS = [
    "${oc.env:DPRAY_SECRET}", "a ${oc.env:DPRAY_SECRET} b", "${data.path}", "${", "\\${x}",
]  # fmt: skip


@pytest.mark.parametrize("value", INTERPOLATIONS)
def test_an_environment_variable_gets_into_no_configuration(
    config_file: Callable[..., str], refuse: Refuse, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("DPRAY_SECRET", "hunter2")
    file = config_file(engine__model=value)
    for command in ("plan", "run"):
        assert "engine.model: " in (line := refuse(command, file)) and "hunter2" not in line
    assert "data.labels: " in refuse("plan", config_file(data__labels=["a", value]))
    assert "method.document_type: " in refuse(
        "plan", config_file(), f"method.document_type={value}"
    )
    escaped = 'privacy.dataset="\\x24{oc.env:DPRAY_SECRET}"'
    assert "privacy.dataset: " in (line := refuse("plan", config_file(), escaped))
    assert "hunter2" not in line
    assert "hunter2" not in refuse("plan", config_file(), f"engine.model\\={escaped[15:]}")


@pytest.mark.parametrize(
    "text",
    [
        NESTED,
        f"data: {DEEP}",
        "data: " + "{a: " * 20_000,
        "data: &d [*d]",
        "a: &a [x]\ndata: {<<: *a}",
        "data: {path: " + "x" * 5_000_000 + "}",
        'data: {path: "a\\0b"}',
        "? [a, b]\n: 1\n",
    ],
    ids=["open", "deep", "braces", "cycle", "merge", "long", "nul", "key"],
)
def test_a_configuration_that_grows_or_nests(tmp_path: Path, refuse: Refuse, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    refuse("plan", str(path))


@pytest.mark.parametrize("value", [DEEP, "&a [*a]", "*a", "!!int x"])
def test_a_setting_that_grows_or_nests(
    config_file: Callable[..., str], refuse: Refuse, value: str
) -> None:
    assert "data.labels" in refuse("plan", config_file(), f"data.labels={value}")


@pytest.mark.parametrize("value", ["a\0b", "a\x1b[31mb", "a\x9bb", "a\rb", "a\ud800"])
def test_control_characters_have_no_place_in_a_configuration(
    settings: Settings, value: str
) -> None:
    for key in ("data__path", "data__labels", "privacy__dataset", "output__path", "engine__model"):
        tree = settings(**{key: [value] if key == "data__labels" else value})
        with pytest.raises(InputError, match=key.replace("__", r"\.")):
            parse_config(tree)


def test_an_error_is_one_plain_line(refuse: Refuse) -> None:
    assert "\ufffd" in refuse("plan", "no\x1b[2Jsuch\nfile.yaml")
    assert "\ufffd" in refuse("report", "no\x1b[2Jsuch\nfolder")
    refuse("ledger", "show", "--ledger", "sqlite:////no/\x1b[2Jsuch.db")
    refuse("plan", "--no\x1bsuch")


@pytest.mark.parametrize("scheme", ["s3://", "gs://", "hf://", "file:///", "abfss://", "s3:/"])
def test_a_cloud_is_no_place_for_output(
    config_file: Callable[..., str], refuse: Refuse, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, scheme: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    place = f"{scheme}bucket/run"
    for command in ("plan", "run"):
        assert "output.path: " in refuse(command, config_file(output__path=place))
    assert "--out: " in refuse("demo", "--out", place)
    assert "--out: " in refuse("audit", config_file(), "--out", f"{place}/a.json")
    assert "--out: " in refuse("evaluate", "--real", "a", "--synthetic", "b", "--out", place)
    ledger = f"sqlite:///{tmp_path}/ledger.db"
    create = ["ledger", "create", "--ledger", ledger, "--dataset", "notes"]
    assert run_command([*create, "--epsilon", "1", "--delta", "1e-6"]) == 0
    assert not list(tmp_path.glob("*:*"))


def test_files_of_a_run_that_nest(
    refuse: Refuse, tmp_path: Path, config_file: Callable[..., str]
) -> None:
    folder = tmp_path / "out"
    (folder / "private").mkdir(parents=True)
    (folder / "synthetic.jsonl").write_text('{"text": "x", "label": "a"}\n')
    deep = '{"a": ' + "[" * 900 + "]" * 900 + "}"
    for text in (DEEP, NESTED, "[]", "7", '{"epsilon": "x"}', deep, ""):
        for name in ("privacy_report.json", "run.json"):
            (folder / name).write_text(text)
            refuse("report", str(folder))
        assert "run.json" in refuse("run", config_file())
    (folder / "schema.json").write_text(DEEP)
    rows = str(folder / "synthetic.jsonl")
    arguments = ["--real", rows, "--synthetic", rows, "--out", str(tmp_path / "e")]
    assert "schema" in refuse("evaluate", *arguments, "--schema", str(folder / "schema.json"))


@pytest.mark.parametrize("unit", [{"a": 1}, [1], float("nan"), "\ud800"])
def test_a_unit_is_a_value(settings: Settings, tmp_path: Path, unit: Any) -> None:
    """{"a": 1, "b": 2} and {"b": 2, "a": 1} are one person, and would be written as two."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "x", "label": "a", "who": unit}) + "\n")
    data = parse_config(settings(data__unit="who")).data
    with pytest.raises(InputError, match=r"^rows\.jsonl, row 1: column 'who' "):
        list(record_rows(FilePart(str(path)), data))


def test_one_number_is_one_unit(settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    written = [f'"who": {who}' for who in ("1", "1.0", "1e0", "-0.0")]
    path.write_text("".join(f'{{"text": "x", "label": "a", {who}}}\n' for who in written))
    data = parse_config(settings(data__unit="who")).data
    units = [record["unit"] for record in record_rows(FilePart(str(path)), data)]
    assert units == ["1", "1", "1", "0"]


def test_parquet_whose_texts_are_no_texts(tmp_path: Path) -> None:
    broken = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    )
    pa.parquet.write_table(pa.table({"text": broken}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"^a\.parquet, row 1: column 'text' has a value that"):
        list(read_rows(str(tmp_path / "a.parquet")))


def test_a_home_that_nobody_has() -> None:
    with pytest.raises(InputError, match=r"^data\.path: ~nobody-of-that-name/x: "):
        list_files("~nobody-of-that-name/x")


def test_a_bracket_in_a_folders_name_is_no_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "notes [1]"
    folder.mkdir()
    (folder / "a.jsonl").write_text("{}\n")
    assert list_files(str(folder)) == [str(folder / "a.jsonl")]
    assert list_files(f"{folder}/*.jsonl") == [str(folder / "a.jsonl")]


def test_private_is_for_its_owner(tmp_path: Path) -> None:
    with closing(ReleaseFolder(str(tmp_path / "new"))) as folder:
        folder.stage("a.json", [{}])
        folder.write_json("run.json", {})
        assert mode(folder.private) == 0o700
        assert mode(folder.staging / "a.json") == 0o600 and mode(folder.private / "lock") == 0o600
        assert mode(folder.root) & 0o077 and mode(folder.root / "run.json") & 0o077
    wide = tmp_path / "old" / "private"
    wide.mkdir(parents=True)
    wide.chmod(0o755)
    with closing(ReleaseFolder(str(tmp_path / "old"))):
        assert mode(wide) == 0o700


def test_a_new_ledger_is_for_its_owner(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.db"
    create = ["ledger", "create", "--ledger", f"sqlite:///{ledger}", "--dataset", "notes"]
    arguments = [*create, "--epsilon", "1", "--delta", "1e-6"]
    assert run_command(arguments) == 0
    assert mode(ledger) == 0o600
    ledger.chmod(0o640)
    assert run_command(arguments) == 0 and mode(ledger) == 0o640
    assert {mode(path) for path in tmp_path.glob("ledger.db-*")} <= {0o640, 0o600}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_configuration_may_hold_what_it_needs(settings: Settings, tmp_path: Path) -> None:
    """Line feeds, tabs, brackets and dollars."""
    path = tmp_path / "config.yaml"
    tree = yaml.safe_dump(settings(data__labels=["a\n\tb", BRACKETS, "$5 {x}"]))
    path.write_text(tree)
    config = load_config(path, ["runtime.actors=2"])
    assert config.data.labels == ("a\n\tb", BRACKETS, "$5 {x}") and config.runtime.actors == 2
