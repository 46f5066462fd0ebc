"""SECURITY.md names what shows its claims."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_files_that_it_names_are_there() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:tests|cluster)/[\w./]+\.\w+)`", text))
    assert len(named) > 12 and {name for name in named if not (ROOT / name).is_file()} == set()
