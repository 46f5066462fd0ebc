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
def test_a_bar_without_an_activity_is_starting(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar():
        while not (written := capsys.readouterr().err):
            threading.Event().wait(0.01)
    assert re.match(r"0:00:\d\d starting", written)


@pytest.mark.usefixtures("at_once")
def test_each_change_of_activity_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("starting", actors=lambda: (3, 4)) as show:
        for number in range(3):
            show(Progress("batches", number, 1500, "12 texts\x1b[2J", 1234.5))
        show(Progress("writing the release"))
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if "starting" not in line]
    assert out == "" and len(lines) == 2
    assert re.fullmatch(
        r"0:00:0\d batches 0 of 1,500; 12 texts�\[2J, 1,234 tokens/s; 3 of 4 actors alive; "
        r"the last part \d s ago",
        lines[0],
    )
    assert re.fullmatch(r"0:00:0\d writing the release; 3 of 4 actors alive", lines[1])


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
def test_the_command_asks_for_no_actors_itself() -> None:
    """A head that answers late would hold it up."""
    asked_by: list[str] = []
    lines: list[str] = []

    def actors() -> tuple[int, int]:
        asked_by.append(threading.current_thread().name)
        return 3, 4

    log = ProgressLog(lines.append, "starting", actors=actors)
    with log.running():
        for activity in ("batches", "writing the release"):
            log.show(Progress(activity))
    assert "batches" in lines[-2] and "writing the release" in lines[-1]
    assert len(asked_by) == len(lines) and {*asked_by} == {"dpray-log"}


@pytest.mark.usefixtures("at_once")
def test_programs_get_objects(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("starting", as_json=True, actors=lambda: (3, 4)) as show:
        show(Progress("texts", 2, None, "eps 1", 5.5))
    last = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert last.pop("seconds") < 10 and last.pop("seconds_since_part") < 10
    assert last == {
        "activity": "texts", "completed": 2, "total": None, "detail": "eps 1",
        "tokens_per_second": 5.5, "actors_alive": 3, "actors_asked": 4,
    }  # fmt: skip


@pytest.mark.parametrize("as_json", [False, True])
def test_a_warning_is_a_line_at_once_and_no_activity(
    as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A short command writes it, too."""
    with progress_bar("starting", as_json=as_json) as show:
        show(Progress("1-private_prediction: warning", detail="method.max_records: of 3 texts 0"))
        show(Progress("batches", 1, 2))
    [line] = capsys.readouterr().err.splitlines()
    if as_json:
        assert json.loads(line)["detail"] == "method.max_records: of 3 texts 0"
    else:
        assert line[7:] == " 1-private_prediction: warning: method.max_records: of 3 texts 0"
