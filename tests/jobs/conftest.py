"""Fixtures for the scripts of `jobs/`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def dp_kps(config_file: Callable[..., str], tmp_path: Path) -> str:
    """The configuration of a run that needs no model."""
    words = tmp_path / "words.txt"
    words.write_text("".join(f"word{number}\n" for number in range(20)))
    method = {
        "name": "dp_kps", "vocabulary": str(words), "vocabulary_size": 7,
        "phrases_per_record": 4, "sequence_length": 3, "records": 8,
    }  # fmt: skip
    return config_file(method=method, engine={"kind": "none"}, privacy__epsilon=8.0)
