"""docs/privacy.md against the code: its numbers, its limits, and the sections that others cite."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dpray.accounting import composed_events, events
from dpray.accounting.accountant import cost
from dpray.runs.privacy_report import NOT_COVERED

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")

_ROW = re.compile(r"^\| `(\w+\(.*\))` \| (\S+) \| ([\d.]+) \| (\w+) \|", re.MULTILINE)
_HEADING = re.compile(r"^#{2,3} (\d+(?:\.\d+)?)\.? ", re.MULTILINE)
_CITATION = re.compile(r"docs/privacy\.md, sections? (\d+(?:\.\d+)?(?:(?:,| and) \d+(?:\.\d+)?)*)")

NUMBERS = _ROW.findall(TEXT)
SECTIONS = set(_HEADING.findall(TEXT))


def test_there_are_numbers_to_check() -> None:
    assert len(NUMBERS) > 10
    assert {bound for *_, bound in NUMBERS} == {"basic", "zcdp", "pld"}


@pytest.mark.parametrize(("event", "delta", "epsilon", "bound"), NUMBERS)
def test_the_accountant_computes_the_stated_epsilon(
    event: str, delta: str, epsilon: str, bound: str
) -> None:
    found = cost(eval(event, vars(events) | vars(composed_events)), float(delta))
    assert (round(found.epsilon, 4), found.bound) == (float(epsilon), bound)


def test_the_limits_of_every_report_are_listed() -> None:
    words = " ".join(TEXT.split())
    assert [limit for limit in NOT_COVERED if limit not in words] == []


def test_cited_sections_exist() -> None:
    cited = {
        f"{path.relative_to(ROOT)}: {number}"
        for folder in ("dpray", "tests", "docs", "experiments")
        for path in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.md")]
        for numbers in _CITATION.findall(" ".join(path.read_text(encoding="utf-8").split()))
        for number in re.findall(r"\d+(?:\.\d+)?", numbers)
        if number not in SECTIONS
    }
    assert sorted(cited) == []


def test_cross_references_exist() -> None:
    referred = re.findall(r"\b(?:section|by|of|in|to)\s(\d\.\d)(?!\d)", TEXT)
    assert len(referred) > 5
    assert sorted(set(referred) - SECTIONS) == []
