"""The points by name are the same in each run, and a run that was not killed at one is no case."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.chaos.kills import Case
from tests.chaos.points import RANDOM


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (
            "checkpoints/steps-00000001-00000002-{hex}-00000.safetensors",
            "steps-00000001-00000002-*",
        ),
        ("parts/{uuid}-00000001.jsonl", "parts/*-00000001.jsonl"),
        ("parts/{hex}-00000001.jsonl", "parts/*-00000001.jsonl"),
    ],
)
def test_a_name_holds_nothing_random(path: str, name: str) -> None:
    found = {RANDOM.sub("*", path.format(hex=uuid4().hex, uuid=uuid4())) for _ in range(20)}
    assert len(found) == 1 and name in found.pop()


def test_a_run_that_was_not_killed_did_not_hold(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case: Any = Case.__new__(Case)
    case.output, case.kills = tmp_path, 0
    monkeypatch.setattr(case, "run", lambda deadly="": 0)
    monkeypatch.setattr(case, "faults", list)
    assert case.tell(["before publish #9"], 4) == "a whole run never came to before publish #9"
