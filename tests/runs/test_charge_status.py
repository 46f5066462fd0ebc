"""Every error that ends a run says whether the run is charged and how it goes on: by DP-KPS, in the
line that the command prints."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError

from dpray.cli import run_command, show_error
from dpray.config.config import Config
from dpray.engines.base import EngineError
from dpray.ledger.ledger import Ledger
from dpray.methods.config import parse_config
from dpray.methods.dp_kps.release import release as dp_kps_release
from dpray.methods.registry import make_plan
from dpray.runs.failures import explain_charge
from dpray.runs.folder import ReleaseFolder
from dpray.runs.runner import Run
from dpray.types import (
    Budget,
    BudgetRefused,
    InputError,
    LedgerFull,
    LedgerUnavailable,
    Resumable,
    RunFailed,
)
from dpray.workers.engine import build_engine
from tests.integration.processes import fill

NOTHING = "nothing was charged"
AGAIN = f"{NOTHING}; the same command begins again"
FREE = "the same command goes on from there, at no further cost"
GOES_ON = f"the run is charged: {FREE}"
FIXED = f"the run is charged: once that is fixed, {FREE}"
ROOM = f"the run is charged, and what was refused is not: with room for it, {FREE}"
SPENT = "the run is charged, and its charge stays spent"

BUDGET = Budget(1.0, 1e-6)
BAD_INPUT = InputError("records.jsonl, row 3: bad")
REFUSED = BudgetRefused("notes", BUDGET, BUDGET, BUDGET)
NO_ENGINE = EngineError("no answer from the endpoint")
NO_LEDGER, FULL_LEDGER = LedgerUnavailable("the ledger x failed"), LedgerFull("no space is left")
FULL_DISK = OSError(errno.ENOSPC, "No space left on device")
UNEXPECTED = RuntimeError("Marlowe")

BEFORE = [
    (BAD_INPUT, 2, NOTHING),
    (REFUSED, 3, NOTHING),
    (NO_ENGINE, 1, NOTHING),
    (NO_LEDGER, 1, NOTHING),
    (FULL_LEDGER, 4, AGAIN),
    (FULL_DISK, 4, AGAIN),
    (Resumable("actors were lost"), 4, AGAIN),
    (RayActorError(), 1, NOTHING),
    (KeyboardInterrupt(), 1, NOTHING),
    (UNEXPECTED, 1, NOTHING),
]
AFTER = [
    (BAD_INPUT, 2, FIXED),
    (REFUSED, 3, ROOM),
    (NO_ENGINE, 4, GOES_ON),
    (NO_LEDGER, 4, GOES_ON),
    (FULL_LEDGER, 4, GOES_ON),
    (FULL_DISK, 4, GOES_ON),
    (Resumable("actors were lost"), 4, GOES_ON),
    (RayActorError(), 4, GOES_ON),
    (KeyboardInterrupt(), 4, GOES_ON),
    (SystemExit(143), 4, GOES_ON),
    (UNEXPECTED, 1, GOES_ON),
    (type("PanicException", (BaseException,), {})("Marlowe"), 1, GOES_ON),
    (RunFailed("votes failed with KeyError"), 1, SPENT),
]


@pytest.fixture
def config(settings: Callable[..., dict[str, Any]], sequences: dict[str, Any]) -> Config:
    return parse_config(settings(**sequences))


class Asked:
    """A plan that raises an error where the runner asks it what the charge is made for."""

    def __init__(self, plan: Any, error: BaseException) -> None:
        self._plan, self._error = plan, error

    def __getattr__(self, name: str) -> Any:
        if name == "cost":
            raise self._error
        return getattr(self._plan, name)


class Ends:
    """Runs a configuration, and raises an error at a place of it."""

    def __init__(self, config: Config, capfd: pytest.CaptureFixture[str]) -> None:
        self.config, self.capfd = config, capfd

    def run(
        self,
        release: Callable[..., Any] = dp_kps_release,
        asked: Callable[[Any], Any] = lambda plan: plan,
    ) -> dict[str, Any]:
        with explain_charge(self.config), closing(ReleaseFolder(self.config.output.path)) as folder:
            plan = asked(make_plan(self.config))
            return Run(plan, folder, release, lambda _: None, build_engine).execute().to_json()
        raise AssertionError

    def before(self, error: BaseException) -> tuple[int, str]:
        return self.shown(lambda: self.run(asked=lambda plan: Asked(plan, error)))

    def after(self, error: BaseException) -> tuple[int, str]:
        def stop(session: Any) -> Any:
            raise error

        return self.shown(lambda: self.run(release=stop))

    def shown(self, run: Callable[[], Any]) -> tuple[int, str]:
        """Return the exit code and the line of a run that ends with an error."""
        self.capfd.readouterr()
        with pytest.raises(BaseException) as ended:
            run()
        code = show_error(ended.value)
        out, line = self.capfd.readouterr()
        assert out == "" and line.count("\n") == 1 and "Marlowe" not in line
        # The last note: the tests share their errors.
        [*_, said] = getattr(ended.value, "__notes__", [str(ended.value)])
        assert said in line
        return code, line.strip()

    @property
    def charges(self) -> int:
        return charges(self.config.privacy.ledger)


def charges(url: str) -> int:
    if not Path(url.removeprefix("sqlite:///")).exists():
        return 0
    account = Ledger.open(url).account("notes")
    return 0 if account is None else len(account.charges)


@pytest.fixture
def ends(config: Config, capfd: pytest.CaptureFixture[str]) -> Ends:
    return Ends(config, capfd)


def test_before_the_charge(ends: Ends):
    for error, code, sentence in BEFORE:
        ended, line = ends.before(error)
        assert ended == code and line.endswith(f"; {sentence}"), error
        assert ends.charges == 0
    assert ends.run()["records"] == 8 and ends.charges == 1


def test_after_the_charge(ends: Ends):
    for error, code, sentence in AFTER:
        ended, line = ends.after(error)
        assert ended == code and line.endswith(f"; {sentence}"), error
        assert ends.charges == 1
    # Also what ends the next command before it comes to the charge.
    assert ends.before(BAD_INPUT)[1].endswith(f"; {FIXED}")
    assert ends.run()["records"] == 8 and ends.charges == 1


def with_state(config: Config, state: str) -> None:
    file = Path(config.output.path) / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"state": state}))


def test_a_charge_that_run_json_does_not_know_of(ends: Ends, config: Config):
    """The process was killed between the two."""
    ends.after(UNEXPECTED)
    with_state(config, "charging")
    assert ends.before(KeyboardInterrupt()) == (4, f"dpray: interrupted; {GOES_ON}")
    assert ends.run()["records"] == 8 and ends.charges == 1


def raises(config: Config, error: Exception) -> None:
    with explain_charge(config):
        raise error


def test_a_charge_that_was_under_way(ends: Ends, config: Config):
    ends.before(UNEXPECTED)
    with_state(config, "charging")
    for error, expected in ((NO_LEDGER, 4), (UNEXPECTED, 1)):
        code, line = ends.shown(lambda error=error: raises(config, error))
        assert code == expected and "; the charge was under way: the same command asks" in line
    assert ends.run()["records"] == 8 and ends.charges == 1


def test_a_broken_run_file_is_not_called_uncharged(ends: Ends, config: Config):
    ends.before(UNEXPECTED)
    (Path(config.output.path) / "run.json").write_text('{"run_id": "1", "sta')
    _, line = ends.shown(lambda: raises(config, UNEXPECTED))
    assert "; run.json in output.path cannot be read, so the run may be charged: " in line


def test_a_failed_mechanism(ends: Ends):
    def release(session: Any) -> Any:
        def fails() -> Any:
            raise ValueError("Marlowe")

        return session.publish_once("counts", fails)

    for _ in range(2):
        code, line = ends.shown(lambda: ends.run(release))
        assert code == 1 and line.endswith(f"cannot be finished; {SPENT}")
    assert ends.charges == 1


def test_a_run_of_another_plan(ends: Ends, config: Config):
    ends.after(UNEXPECTED)
    privacy = config.privacy.model_copy(update={"epsilon": 7.0})
    ends.config = config.model_copy(update={"privacy": privacy})
    code, line = ends.shown(ends.run)
    assert code == 2 and line.endswith(f"choose another folder; {NOTHING}")


@pytest.mark.parametrize(
    ("change", "other"),
    [
        ({"records": 7}, "began with another configuration (other now: method.records)"),
        ({"epsilon": 7.0}, "of another plan (privacy.epsilon: 8.0 there, 7.0 here)"),
    ],
)
def test_a_finished_run_is_not_told_to_go_on(
    ends: Ends, config: Config, change: dict[str, Any], other: str
):
    ends.run()
    section = "method" if "records" in change else "privacy"
    changed = getattr(config, section).model_copy(update=change)
    ends.config = config.model_copy(update={section: changed})
    code, line = ends.shown(ends.run)
    assert code == 2 and "holds a finished run " in line and f"{other}; another run" in line
    assert line.endswith(f"an output.path of its own, and is charged by itself; {NOTHING}")
    assert ends.charges == 1


def test_a_run_that_is_not_private(settings: Callable[..., Any], tmp_path: Path):
    changes = {"method": {"name": "aug_pe", "records": 8}, "privacy__epsilon": float("inf")}
    config = parse_config(settings(**changes))
    file = Path(config.output.path) / "run.json"
    file.parent.mkdir()
    file.write_text('{"run_id": "1", "state": "reserved", "not_private": true}')
    with pytest.raises(Resumable) as ended, explain_charge(config):
        raise Resumable("interrupted")
    assert str(ended.value) == f"interrupted; {AGAIN}"


@pytest.fixture
def command(
    settings: Callable[..., Any], sequences: dict[str, Any], config_file: Callable[..., str],
    capfd: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str]]:  # fmt: skip
    def run(*after: str, **changes: Any) -> tuple[int, str]:
        capfd.readouterr()
        code = run_command(["run", config_file(**sequences | changes), *after])
        out, err = capfd.readouterr()
        assert code == 0 or out == ""
        return code, err

    return run


def test_the_command_says_it_as_text_and_as_json(
    command: Callable[..., tuple[int, str]], tmp_path: Path
):
    for after in ("method.recods=9", "data.path=/no/such.jsonl", "privacy.epsilon=1:30"):
        code, line = command(after)
        assert code == 2 and line.endswith(f"; {NOTHING}\n") and line.count("\n") == 1
        assert command(after, "--json") == (code, line)
    ledger = Ledger.create_or_open(f"sqlite:///{tmp_path}/ledger.db")
    ledger.create_dataset("notes", Budget(0.5, 1e-5), "record", "add_or_remove_one")
    code, line = command()
    assert code == 3 and line.endswith(f"; {NOTHING}\n")
    assert command("--json") == (code, line)
    elsewhere = f"output.path={tmp_path}/elsewhere"
    code, line = command(elsewhere, privacy__ledger="postgresql://nobody@127.0.0.1:1/none")
    assert code == 1 and line.endswith(f"; {NOTHING}\n")


@pytest.mark.parametrize("place", ["make_plan", "is_finished", "_find"])
def test_an_interruption_before_the_charge_is_a_line(
    command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch, place: str
):
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"dpray.methods.registry.{place}", interrupted)
    for after in ((), ("--json",)):
        code, err = command(*after)
        assert (code, err) == (1, f"dpray: interrupted; {NOTHING}\n")


@pytest.mark.parametrize(("left", "there"), [(0, True), (16384, True), (0, False)])
def test_a_full_disk_of_the_ledger(
    small_disk: Path, command: Callable[..., tuple[int, str]], left: int, there: bool
):
    url = f"sqlite:///{small_disk}/ledger.db"
    if there:
        budget = Budget(100, 1e-3)
        Ledger.create_or_open(url).create_dataset("notes", budget, "record", "add_or_remove_one")
    filler = fill(small_disk, left)
    code, line = command(privacy__ledger=url)
    assert code == 4 and "no space is left on" in line and "make room" in line
    assert line.count("\n") == 1 and ("charged" in line)
    filler.unlink()
    assert command(privacy__ledger=url)[0] == 0 and charges(url) == 1


@pytest.mark.parametrize("left", [0, 4096, 16384, 32768])
def test_a_full_disk_of_the_output(
    small_disk: Path, command: Callable[..., tuple[int, str]], tmp_path: Path, left: int
):
    filler = fill(small_disk, left)
    path, url = str(small_disk / "out"), f"sqlite:///{tmp_path}/ledger.db"
    code, line = command(output__path=path)
    assert code == 4 and "no space is left" in line and "make room" in line
    assert line.endswith((f"; {AGAIN}\n", f"; {GOES_ON}\n"))
    assert (GOES_ON in line) == (charges(url) == 1)
    filler.unlink()
    assert command(output__path=path)[0] == 0 and charges(url) == 1
