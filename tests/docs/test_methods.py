"""docs/methods.md documents the keys that there are, with their defaults."""

from __future__ import annotations

import re

from tests.docs.keys import PAGE, sections, with_tables


def test_every_section_has_a_table() -> None:
    marks = re.findall(r"<!-- keys: (\w+) -->", PAGE.read_text(encoding="utf-8"))
    assert sorted(marks) == sorted(sections())


def test_the_tables_are_those_of_the_settings() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_tables(page), "run python -m tests.docs.keys"
