"""The files, classes and functions that the pages name exist. The code is read, not imported."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")],
    key=lambda page: page.name,
)
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MOST_HOPS = 8

_NAMED = re.compile(r"`((?:dpray|tests|experiments|jobs|cluster)/[\w/.]+?\.\w+)(?::([\w.]+))?`")
_WAY = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


@cache
def names_in(file: Path) -> set[str]:
    """Return the functions and classes of a file, and the methods and fields of its classes."""
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        names |= set(_names(node))
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for inner in node.body for name in _names(inner)}
    return names


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    missing = []
    for path, name in _NAMED.findall(page.read_text(encoding="utf-8")):
        file = ROOT / path
        if not file.is_file() or (name and name not in names_in(file)):
            missing.append(f"{path}:{name}" if name else path)
    assert missing == []


@pytest.mark.parametrize(("way", "text"), _WAY.findall(ARCHITECTURE), ids=lambda text: text[:20])
def test_a_way_has_few_hops_and_each_names_code(way: str, text: str) -> None:
    hops = re.split(r"^\d+\. ", text, flags=re.MULTILINE)[1:]
    assert 3 < len(hops) <= MOST_HOPS
    assert all(_NAMED.search(hop) for hop in hops)


def test_there_are_four_ways() -> None:
    assert len(_WAY.findall(ARCHITECTURE)) == 4
