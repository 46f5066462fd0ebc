"""A run's folder that is copied, may not be written, or is resumed with something else; and other
commands on its ledger meanwhile. By DP-KPS, which runs two mechanisms and needs no model."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from dpray.cli import run_command
from dpray.config.config import Config
from dpray.ledger import transaction
from dpray.ledger.ledger import Ledger
from dpray.methods import registry as methods
from dpray.runs.runner import other_values
from dpray.types import Budget, DprayError, InputError, RunFailed
from tests.chaos.recount import recount

SQLITE = pytest.mark.parametrize("url", ["sqlite"], indirect=True)


@pytest.fixture
def room(url: str) -> None:
    """A budget for many runs."""
    Ledger.create_or_open(url).create_dataset(
        "notes", Budget(100, 1e-3), "record", "add_or_remove_one"
    )


def copied(run: Config, config: Callable[..., Config]) -> Config:
    copy = f"{run.output.path}-copy"
    shutil.copytree(run.output.path, copy)
    return config(output__path=copy)


def faults(*runs: Config) -> list[str]:
    return recount(runs[0].privacy.ledger, [Path(run.output.path) for run in runs])


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Let nobody write to a folder: by its mode, or by a mount for the superuser, whom no mode
    keeps out."""
    if os.getuid() != 0:
        folder.chmod(0o500)
        yield
        folder.chmod(0o700)
        return
    for options in (["--bind"], ["-o", "remount,ro,bind"]):
        subprocess.run(["mount", *options, folder, folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("copied_at", ["VocabularyShard", "total_sums"])
def test_of_a_copied_folder_and_its_original_one_is_finished(
    config: Callable[..., Config], cut_off: Callable[..., None], copied_at: str
) -> None:
    """They have one charge, which pays for one output of each mechanism."""
    run = config()
    cut_off(run, copied_at)
    copy = copied(run, config)
    methods.run(run)
    for _ in range(2):
        with pytest.raises(
            RunFailed, match=r"^output\.path: another copy .*; the run is charged, "
        ):
            methods.run(copy)
        assert not (Path(copy.output.path) / "synthetic.jsonl").exists()
    assert faults(run, copy) == []


@pytest.mark.usefixtures("room")
def test_a_folder_and_its_copy_at_once(
    config: Callable[..., Config], cut_off: Callable[..., None]
) -> None:
    run = config()
    cut_off(run, "VocabularyShard")
    together = threading.Barrier(2)

    def finish(one: Config) -> bool:
        together.wait()
        try:
            return methods.run(one)["records"] == 8
        except DprayError:
            return False

    both = [run, copied(run, config)]
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(finish, both))
    # Each may have published one of the mechanisms, and then neither can be finished.
    assert sum(ended) <= 1
    assert sum((Path(one.output.path) / "synthetic.jsonl").exists() for one in both) == sum(ended)
    assert faults(*both) == []


@SQLITE
def test_the_copy_of_a_finished_folder_has_the_same_release(config: Callable[..., Config]) -> None:
    run = config()
    report = methods.run(run)
    copy = copied(run, config)
    assert methods.run(copy) == report
    assert faults(run, copy) == []


@SQLITE
def test_a_folder_that_may_not_be_written_is_one_line_and_the_run_goes_on_after_it(
    config: Callable[..., Config], cut_off: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "ledger").mkdir()
    run = config(privacy__ledger=f"sqlite:///{tmp_path}/ledger/ledger.db")
    cut_off(run, "total_sums")
    for place in ("out", "out/private", "ledger"):
        with read_only(tmp_path / place), pytest.raises(DprayError) as stopped:
            methods.run(run)
        said = str(stopped.value)
        assert "\n" not in said and "Marlowe" not in said
        assert said.endswith("the same command goes on from there, at no further cost")
    assert methods.run(run)["records"] == 8
    assert faults(run) == []


@SQLITE
def test_a_new_run_where_nothing_may_be_written_is_charged_nothing(
    config: Callable[..., Config], tmp_path: Path
) -> None:
    folder = tmp_path / "closed"
    folder.mkdir()
    ledger = f"sqlite:///{folder}/ledger.db"
    with read_only(folder):
        with pytest.raises(InputError, match=r"^output\.path: .*; nothing was charged$"):
            methods.run(config(output__path=str(folder / "out")))
        with pytest.raises(
            InputError, match=r"^the ledger .* cannot be made: .*nothing was charged"
        ):
            methods.run(config(privacy__ledger=ledger))
    assert not list(folder.iterdir())


@pytest.mark.usefixtures("room")
@SQLITE
def test_a_run_that_began_is_resumed_with_nothing_else(
    config: Callable[..., Config],
    cut_off: Callable[..., None],
    tmp_path: Path,
    records_file: Path,
) -> None:
    """A run in which nothing has begun takes the new configuration (`test_charging`)."""
    run, words = config(), tmp_path / "words.txt"
    cut_off(run, "total_sums")
    engine = {"kind": "openai", "model": "m", "base_url": "http://x/v1"}
    moved = str(shutil.copy(records_file, tmp_path / "moved.jsonl"))
    changed: list[tuple[dict[str, Any], str]] = [
        ({"data__path": moved}, "another configuration"),
        ({"method__records": 9}, "another configuration"),
        ({"engine": engine}, "another configuration"),
        ({"embedder": {"model": "another"}}, "another configuration"),
        ({"data__max_characters": 1000}, "another configuration"),
        ({"privacy__epsilon": 9.0}, r"another plan \(privacy\.epsilon: 8\.0 there, 9\.0 here\)"),
        ({}, r"other files of method\.vocabulary"),
    ]
    before = words.read_text()
    for changes, refused in changed:
        if not changes:
            words.write_text(before.replace("word19", "word19 again"))
        with pytest.raises(InputError, match=rf"^output\.path: .*{refused}") as stopped:
            methods.run(config(**changes))
        assert "\n" not in str(stopped.value) and "Marlowe" not in str(stopped.value)
    words.write_text(before)
    assert methods.run(run)["records"] == 8
    assert faults(run) == []


@pytest.mark.usefixtures("room")
def test_commands_on_the_ledger_while_a_run_is_charged_and_publishes(
    config: Callable[..., Config], url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run, ended = config(), threading.Event()

    def ask(command: list[str]) -> set[int]:
        codes = {run_command(["ledger", *command, "--ledger", url])}
        while not ended.wait(0.05):
            codes.add(run_command(["ledger", *command, "--ledger", url]))
        return codes

    more = ["create", "--dataset", "more", "--epsilon", "1", "--delta", "1e-6"]
    with ThreadPoolExecutor(4) as pool:
        asked = list(map(pool.submit, [ask] * 4, (["show"], ["verify"], ["export"], more)))
        report = methods.run(run)
        ended.set()
        assert [each.result() for each in asked] == [{0}] * 4
    assert report["records"] == 8 and "Marlowe" not in "".join(capfd.readouterr())
    assert faults(run) == []


@pytest.mark.usefixtures("room")
@SQLITE
def test_a_clock_that_jumps_both_ways_changes_nothing(
    config: Callable[..., Config], cut_off: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger's order is that of its entries; their times are for people."""
    years = cycle([-30, 40, 0])

    def now() -> str:
        return (datetime.now(UTC) + timedelta(days=365 * next(years))).isoformat()

    monkeypatch.setattr(transaction, "now", now)
    run = config()
    cut_off(run, "total_sums")
    report = methods.run(run)
    ledger = Ledger.open(run.privacy.ledger)
    times = [row["at"] for row in ledger.export() if row["at"]]
    assert times != sorted(times) and ledger.verify() == [] == faults(run)
    assert report["ledger"]["spent"]["epsilon"] == report["epsilon"]


def test_long_values_and_keys_of_one_side_are_not_shown_as_other_values() -> None:
    before = {"method": {"name": "aug_pe", "old": 1, "records": 6}, "data": {"labels": ["a"] * 40}}
    now = {
        "method": {"name": "aug_pe", "new": 1, "records": 20},
        "data": {"labels": ["b"]},
        "privacy": {"epsilon": 1.0},
    }
    assert other_values(before, now) == [
        "method.records: 6 there, 20 here",
        "data.labels differs",
    ]
    other = now | {"method": {"name": "dp_kps", "records": 6}, "data": before["data"]}
    assert other_values(before, other) == ['method.name: "aug_pe" there, "dp_kps" here']
    many = {"method": {str(key): key for key in range(7)}}
    shown = other_values(many, now | {"method": dict.fromkeys(many["method"], 9)})
    assert len(shown) == 6 and shown[-1] == "and 2 more"
    assert other_values(None, now) == []
