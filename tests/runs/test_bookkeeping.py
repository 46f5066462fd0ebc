"""What a run is charged, and what of it is released once, when ledgers, folders and machines fail
between two steps. By DP-KPS, which runs two mechanisms and needs no model."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import WorkerCrashedError

from dpray.cli import interrupt_on_sigterm
from dpray.config.config import Config
from dpray.ledger.ledger import Ledger
from dpray.methods import registry as methods
from dpray.methods.registry import make_plan
from dpray.runs.failures import release_with_repeats
from dpray.runs.folder import ReleaseFolder
from dpray.runs.session import FAILURES, Session
from dpray.types import (
    Budget,
    DprayError,
    InputError,
    LedgerUnavailable,
    MissingLedger,
    Progress,
    Resumable,
    RunFailed,
)
from dpray.workers.engine import build_engine
from tests.integration.processes import fill

pytestmark = pytest.mark.parametrize("url", ["sqlite"], indirect=True)


def ledger_file(run: Config) -> Path:
    return Path(run.privacy.ledger.removeprefix("sqlite:///"))


def spent(run: Config) -> tuple[float, int]:
    ledger = Ledger.open(run.privacy.ledger)
    account = ledger.account("notes")
    ledger.close()
    return account.spent.epsilon, len(account.charges)


@pytest.mark.parametrize("backed_up", ["before anything began", "while the first pass ran"])
def test_a_ledger_that_was_put_back_has_nothing_drawn_twice(
    config: Callable[..., Config],
    cut_off: Callable[..., None],
    backed_up: str,
    tmp_path: Path,
) -> None:
    run, backup = config(), tmp_path / "backup.db"
    back_up = "VocabularyShard" if backed_up.startswith("before") else "total_counts"
    cut_off(run, back_up, lambda: shutil.copy(ledger_file(run), backup))
    cut_off(run, "total_sums")
    first = (Path(run.output.path) / "private/parts/vocabulary.json").read_bytes()
    shutil.copy(backup, ledger_file(run))
    for changes in ({}, {"method__sequence_length": 2}):
        with pytest.raises(InputError, match=r"^output\.path: "):
            methods.run(config(**changes))
    assert (Path(run.output.path) / "private/parts/vocabulary.json").read_bytes() == first
    assert not (Path(run.output.path) / "synthetic.jsonl").exists()


def test_a_folder_without_its_run_is_charged_nothing_and_released_nothing(
    config: Callable[..., Config], cut_off: Callable[..., None]
) -> None:
    run = config()
    cut_off(run, "total_sums")
    (Path(run.output.path) / "run.json").unlink()
    before = spent(run)
    with pytest.raises(InputError, match=r"output\.path: .* a run whose run\.json is gone"):
        methods.run(run)
    assert spent(run) == before


def test_a_run_that_stopped_after_its_charge_goes_on(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = Ledger.reserve

    def cut_off_afterwards(*arguments: Any, **options: Any) -> Any:
        made = reserve(*arguments, **options)
        if options.get("is_trial"):
            return made
        raise DprayError("cut off")

    run = config()
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "reserve", cut_off_afterwards)
        with pytest.raises(DprayError, match="cut off"):
            methods.run(run)
    assert json.loads((Path(run.output.path) / "run.json").read_text())["state"] == "charging"
    before = spent(run)
    assert methods.run(run)["epsilon"] == before[0]
    assert spent(run) == before == (pytest.approx(8.0, rel=1e-4), 1)


@pytest.mark.parametrize("ends", ["SIGTERM", "SystemExit"])
def test_a_run_that_is_told_to_end_says_what_is_charged_and_can_be_resumed(
    config: Callable[..., Config], ends: str
) -> None:
    """By SIGTERM to the command, or by `ray job stop`: Ray makes a SystemExit of it."""

    def stop(progress: Progress) -> None:
        if progress.activity == "densities" and ends == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        elif progress.activity == "densities":
            raise SystemExit(15)

    before = signal.getsignal(signal.SIGTERM)
    interrupt_on_sigterm()
    try:
        with pytest.raises(Resumable) as ended:
            methods.run(config(), stop)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert str(ended.value) == (
        "interrupted; the run is charged: the same command goes on from there, at no further cost"
    )
    assert methods.run(config())["records"] == 8


def test_output_whose_commit_was_answered_by_nobody_is_kept(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, calls = Ledger.publish, []

    def answer_lost(ledger: Ledger, *arguments: Any) -> int:
        published = publish(ledger, *arguments)
        calls.append(published)
        if len(calls) == 1:
            raise WorkerCrashedError
        return published

    monkeypatch.setattr(Ledger, "publish", answer_lost)
    assert methods.run(config())["records"] == 8
    assert calls == [1, 1]  # the vocabulary was not drawn again, the densities were drawn once


def test_a_new_ledger_is_told_of_and_only_a_file_is_made(
    config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    records_file: Path,
) -> None:
    run = config()
    first = methods.run(run)
    assert first["ledger"]["made_by_this_run"] is True
    with closing(Ledger.open(run.privacy.ledger)) as ledger:
        ledger.create_dataset("more", Budget(8.0, 1e-5), "record", "add_or_remove_one")
    records_file.write_text(records_file.read_text().replace("Marlowe 7", "Marlowe seven"))
    other = {"output__path": str(tmp_path / "other"), "privacy__dataset": "more"}
    assert methods.run(config(**other))["ledger"]["made_by_this_run"] is False

    def gone(url: str) -> Ledger:
        raise MissingLedger("there is no ledger")

    monkeypatch.setattr(Ledger, "open", gone)
    monkeypatch.setattr(Ledger, "create_or_open", None)
    other = {"output__path": str(tmp_path / "third"), "privacy__ledger": "postgresql://host/name"}
    with pytest.raises(InputError, match="there is no ledger"):
        methods.run(config(**other))


def test_what_people_keep_in_private_survives_the_run(config: Callable[..., Config]) -> None:
    """A ledger in a folder of its own, before all: without it the next run would be free."""
    run = config()
    ledger = Path(run.output.path) / "private" / "ledger" / "ledger.db"
    ledger.parent.mkdir(parents=True)
    privacy = run.privacy.model_copy(update={"ledger": f"sqlite:///{ledger}"})
    methods.run(run.model_copy(update={"privacy": privacy}))
    assert Ledger.open(f"sqlite:///{ledger}").names() == ["notes"]


@contextmanager
def session_of(run: Config) -> Iterator[Session[Any]]:
    """A session of a run that is charged."""
    plan, unit = make_plan(run), ("record", "add_or_remove_one")
    with (
        closing(Ledger.create_or_open(run.privacy.ledger)) as ledger,
        closing(ReleaseFolder(run.output.path)) as folder,
    ):
        cost = Budget(plan.cost.epsilon, plan.cost.delta)
        ledger.create_dataset("notes", cost, *unit)
        ledger.reserve("notes", {"run": (plan.dp_event, cost)}, *unit)
        yield Session(plan, folder, ledger, "run", "0" * 32, lambda progress: None, build_engine)


@pytest.mark.parametrize("fault", [KeyError("Marlowe"), DprayError("an engine actor failed")])
def test_a_failure_is_recorded_once_the_ledger_answers_again(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    """Otherwise what failed by itself would be drawn again: that it failed is an answer, too."""

    def gone(*_: Any, **__: Any) -> Any:
        raise LedgerUnavailable("the ledger gives no answer")

    with session_of(config()) as session:
        noted = session.folder.private / FAILURES
        with monkeypatch.context() as patch:

            def draw() -> Any:
                patch.setattr(Ledger, "write", gone)
                patch.setattr(Ledger, "read", gone)
                raise fault

            with pytest.raises(DprayError) as ended:
                release_with_repeats(iter([session]), lambda s: s.publish_once("counts", draw))
        assert "Marlowe" not in f"{ended.value}{noted.read_text()}"
        assert fault is ended.value or "it is never repeated" in str(ended.value)
        again = replace(session, attempt_id="b" * 32)
        with pytest.raises(RunFailed, match=f"counts failed with {type(fault).__name__}"):
            release_with_repeats(iter([again]), lambda s: s.publish_once("counts", dict))
        assert not noted.exists()


def on_disk(make: Callable[..., Config], disk: Path, ledger_too: bool) -> Config:
    ledger = {"privacy__ledger": f"sqlite:///{disk}/ledger.db"} if ledger_too else {}
    return make(output__path=str(disk / "out"), **ledger)


def full(disk: Path, draw: int) -> Callable[[], dict[str, Any]]:
    """A mechanism during which the disk gets full, and which draws so many bytes."""

    def mechanism() -> dict[str, Any]:
        fill(disk, 0)
        return {"drawn": "x" * draw}

    return mechanism


@pytest.mark.parametrize(("draw", "ledger_too"), [(1, False), (100_000, True)])
def test_a_disk_that_is_full_after_a_draw_has_room_for_it(
    config: Callable[..., Config], small_disk: Path, draw: int, ledger_too: bool
) -> None:
    """Whatever its size: else the disk would choose which draws are released."""
    with session_of(on_disk(config, small_disk, ledger_too)) as session:
        session.folder.take_room()
        with pytest.raises(Resumable, match="no space is left on its disk"):
            session.publish_once("counts", full(small_disk, draw))
        assert session.publish_once("counts", dict) == {"drawn": "x" * draw}
        assert session.ledger.counts("run")["starts"] == 1


def test_a_draw_that_its_room_does_not_hold_has_failed(
    config: Callable[..., Config], small_disk: Path
) -> None:
    """The ledger says so, though it is on the same disk."""
    with session_of(on_disk(config, small_disk, ledger_too=True)) as session:
        session.folder.take_room()
        with pytest.raises(OSError, match="No space left"):
            session.publish_once("counts", full(small_disk, 900_000))
        with pytest.raises(RunFailed, match=r"failed with OSError.*never repeated"):
            session.publish_once("counts", dict)


def test_without_room_on_the_disk_nothing_is_drawn(
    config: Callable[..., Config], small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = on_disk(config, small_disk, ledger_too=False)
    monkeypatch.setattr(ReleaseFolder, "recover", lambda *_: fill(small_disk, 128 << 10))
    with pytest.raises(Resumable, match="no space is left on its disk"):
        methods.run(run)
    with closing(Ledger.open(run.privacy.ledger)) as ledger:
        assert [row["kind"] for row in ledger.export()].count("begin") == 0
