"""Without a terminal a long command writes plain lines; a short one writes none."""

from __future__ import annotations

import json
import re
import threading

import pytest

from dpray import terminal
from dpray.terminal import ProgressLog, progress_bar
from dpray.types import Progress


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "QUIET_SECONDS", 0.0)


def test_a_short_command_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("starting") as show:
        show(Progress("batches", 1, 2))
        show(Progress("writing the release"))
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("at_once")
def test_each_change_of_activity_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("starting") as show:
        for number in range(3):
            show(Progress("batches", number, 1500, "12 tokens a second\x1b[2J"))
        show(Progress("writing the release"))
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if "starting" not in line]
    assert out == "" and len(lines) == 2
    assert re.fullmatch(r"0:00:0\d batches 0 of 1,500; 12 tokens a second�\[2J", lines[0])
    assert re.fullmatch(r"0:00:0\d writing the release", lines[1])


@pytest.mark.usefixtures("at_once")
def test_a_line_comes_though_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.01)
    lines: list[str] = []
    log = ProgressLog(lines.append, "batches")
    with log.running():
        log.show(Progress("batches", 3, 4))
        while len(lines) < 3:
            threading.Event().wait(0.01)
    written = len(lines)
    assert all(re.match(r"0:00:0\d batches", line) for line in lines)
    assert "batches 3 of 4; the last part 0 s ago" in lines[-1]
    log.show(Progress("batches", 4, 4))
    assert len(lines) == written, "nothing is written once the command has ended"


@pytest.mark.usefixtures("at_once")
def test_programs_get_objects(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("starting", as_json=True) as show:
        show(Progress("texts", 2, None, "3 of 4 actors"))
    last = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert last.pop("seconds") < 10 and last.pop("seconds_since_part") < 10
    assert last == {"activity": "texts", "completed": 2, "total": None, "detail": "3 of 4 actors"}
