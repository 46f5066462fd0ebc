"""The files, classes and functions that the pages name exist. The code is read, not imported."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")],
    key=lambda page: page.name,
)
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MOST_HOPS = 8
FILES = {"A private text": 10, "A charge": 8, "A DP-SGD step": 7, "An Aug-PE vote": 6}

SEAMS = {
    # An algorithm knows the protocol in engines/base.py; the configuration names the engine.
    "dpray.engines.vllm.engine",
    # vLLM loads its logits processor by name.
    "dpray.engines.vllm.lockstep",
    # A request names its selector, which is built where the logits are.
    "dpray.methods.private_prediction.token",
    # The loop calls two functions before and after a step, and does not know the journal.
    "dpray.methods.dp_sgd.training.journal",
}
"""The files that a way comes to without an import."""

_NAMED = re.compile(
    r"`((?:dpray|tests|benchmarks|experiments|jobs|cluster)/[\w/.]+?\.\w+)(?::([\w.]+))?`"
)
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


def modules(text: str) -> list[str]:
    """Return the modules that a text names, each once, in its order."""
    return list(dict.fromkeys(re.findall(r"`(dpray/[\w/]+)\.py", text)))


def test_a_way_passes_few_files_and_follows_the_imports() -> None:
    graph = grimp.build_graph("dpray", cache_dir=None)
    for way, number in FILES.items():
        files = [name.replace("/", ".") for name in modules(dict(_WAY.findall(ARCHITECTURE))[way])]
        assert len(files) == number, way
        jumps = set()
        for place, file in enumerate(files[1:], start=1):
            before = graph.find_modules_directly_imported_by(file) & {*files[:place]}
            after = graph.find_modules_that_directly_import(file) & {*files[:place]}
            if not before | after:
                jumps.add(file)
        assert jumps == SEAMS & {*files}, way
