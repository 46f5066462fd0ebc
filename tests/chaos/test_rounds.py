"""Rounds in which one process ends at a state of a run (`make chaos`), and what they find."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dpray.workers import shards
from tests.chaos.held_workers import come_to
from tests.chaos.kept import ROUNDS
from tests.chaos.rehearsed import METHODS, Rehearsed
from tests.chaos.rounds import NODE, Rounds
from tests.conftest import ROOT
from tests.engines.bag_of_words import BagOfWords
from tests.integration.processes import Runs, environment


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("method", METHODS)
def test_one_process_ends_at_a_state(method: str) -> None:
    command = [sys.executable, "-m", "tests.chaos.rounds", "--method", method]
    ended = subprocess.run([*command, "--rounds", str(ROUNDS)], cwd=ROOT, env=environment())
    assert ended.returncode == 0


def test_a_worker_stands_still_at_one_time_of_one_state(tmp_path: Path) -> None:
    (tmp_path / "passed").mkdir()
    (tmp_path / "go").write_text("kill")
    held = tmp_path / "held"
    for state, is_held in [("read", False), ("part", False), ("part", True), ("part", False)]:
        come_to(tmp_path, state, "part", 2)
        assert held.exists() == is_held
        held.unlink(missing_ok=True)
    assert {file.name for file in (tmp_path / "passed").iterdir()} == {
        "read 1", "part 1", "part 2", "part 3",
    }  # fmt: skip


def test_what_does_not_hold_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SentenceTransformerEmbedder", BagOfWords)
    rehearsed, cluster = Rehearsed("dp_kps", tmp_path), Any
    tree = rehearsed.tree(tmp_path / "out", f"sqlite:///{tmp_path}/ledger.db")
    report = rehearsed.run(tree)
    run, rounds = Runs(tree, cluster, tmp_path), Rounds.__new__(Rounds)
    rounds.method, rounds.by = "dp_kps", "kill"
    rounds.released, rounds.groups = run.synthetic(), set()
    assert rounds.faults(run, report, most=0) == []
    assert rounds.faults(run, report, most=-1) == ["0 were repeated, not -1 at most"]
    rounds.groups = {"a/0001 0123"}
    rounds.released = [*rounds.released[1:], json.dumps({"text": "another"})]
    (tmp_path / "out" / "private" / "embeddings").mkdir()
    assert rounds.faults(run, report, most=0) == [
        "embeddings was left behind",
        "the release is not that of the undisturbed run",
        "the batches do not have the rows of the undisturbed run",
    ]
    assert [rounds.most_lost(victim) for victim in (None, "ShardActor", NODE)] == [0, 0, 1]
