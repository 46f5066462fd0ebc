"""The pages document the keys that there are, with their defaults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.keys import PAGES, sections, with_tables


def test_every_section_has_a_table() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert sorted(re.findall(r"<!-- keys: (\w+) -->", pages)) == sorted(sections())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tables_are_those_of_the_settings(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == with_tables(text), "run python -m tests.docs.keys"
