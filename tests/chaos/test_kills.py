"""Each method is killed at each of its points by name, and several times in a row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.kept import FIRST, NUMBERS, database_of, keep
from tests.chaos.recount import read
from tests.chaos.rehearsed import METHODS
from tests.conftest import ROOT
from tests.integration.processes import environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

STATES = {
    f"{place} {operation} #1"
    for place in ("before", "uncommitted", "after")
    for operation in ("reserve", "begin", "publish", "commit")
}
"""A run of any method passes these on its way from planned to finished, among many others."""


def killed(method: str, folder: Path, *options: str, **variables: str) -> list[dict[str, Any]]:
    """Return what became of each case; all lines are kept before any of them fails the test."""
    lines = []
    with subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.kills", method, str(folder), *options],
        cwd=ROOT,
        env=environment(TOKENIZERS_PARALLELISM="false", **variables),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                lines.append(json.loads(line))
                keep(**lines[-1], clock_jumps=bool(variables))
    assert lines and all(line["result"] == "held" for line in lines), lines
    assert process.returncode == 0
    return lines


def place_of(database: str, request: pytest.FixtureRequest) -> list[str]:
    if database == "sqlite":
        return []
    return ["--postgresql", request.getfixturevalue("postgresql_socket")]


def test_dp_kps_killed_at_the_ledgers_points(tmp_path: Path) -> None:
    """The suite's part of `make chaos`."""
    states = "^(uncommitted|after) (reserve|publish|commit) #1$"
    lines = killed("dp_kps", tmp_path / "kills", "--only", states)
    assert len({line["story"][0] for line in lines} & STATES) == 6


@pytest.mark.chaos
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_killed_at_each_point(
    method: str, database: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    first = ["--first", str(FIRST)]
    lines = killed(method, tmp_path / "kills", *place_of(database, request), *first)
    points = {line["story"][0] for line in lines}
    assert points >= STATES or FIRST
    assert len(points) == lines[0]["points"] - FIRST


@pytest.mark.chaos
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_killed_several_times(
    method: str, database: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    numbers = [n for n in NUMBERS if database_of(n) == database]
    rounds = [option for n in numbers for option in ("--round", str(n))]
    if rounds:
        killed(method, tmp_path / "kills", *place_of(database, request), *rounds)


@pytest.mark.chaos
@pytest.mark.parametrize("method", METHODS)
def test_killed_while_the_clock_jumps(method: str, tmp_path: Path) -> None:
    """By 400 days, forward and back, at every point of a run."""
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    assert found, "apt-get install faketime"
    clock = tmp_path / "clock"
    clock.write_text("+0")
    variables = {
        "LD_PRELOAD": str(found[0]),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    states = "^(uncommitted|after) (reserve|begin|publish|commit) #1$"
    killed(method, tmp_path / "kills", "--only", states, **variables)
    entries, _ = read(f"sqlite:///{tmp_path}/kills/rehearsal/ledger.db")
    times = [entry.at for entry in entries if entry.at]
    assert times != sorted(times)
