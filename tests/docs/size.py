"""Measure how large dpray is. `python -m tests.docs.size` prints the numbers of `size.toml`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]
SIZES = Path(__file__).with_name("size.toml")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def lines_of(folder: str, pattern: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in (ROOT / folder).glob(pattern))


def room_of(module: str) -> str:
    """Return the folder of `dpray`, or the file at its root, that a module is in."""
    return ".".join(module.split(".")[:2])


def arrows() -> set[tuple[str, str]]:
    """Return the pairs of rooms of which the first imports the second, anywhere in its code."""
    graph = grimp.build_graph("dpray", cache_dir=None)
    return {
        (room_of(module), room_of(imported))
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
        if room_of(module) != room_of(imported)
    }


def in_circles(pairs: set[tuple[str, str]]) -> int:
    """Return how many arrows are left when rooms that only import, or are only imported, are taken
    away one after the other. Without any, all arrows can be drawn downwards."""
    uppers, lowers = ({pair[end] for pair in pairs} for end in (0, 1))
    inner = {(upper, lower) for upper, lower in pairs if upper in lowers and lower in uppers}
    return len(pairs) if inner == pairs else in_circles(inner)


def inner_imports(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the imports within functions."""
    functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
    inner = {node for function in functions for node in ast.walk(function)}
    return (node for node in inner if isinstance(node, ast.Import | ast.ImportFrom))


def measure() -> dict[str, int]:
    """Return each measure by its name in `size.toml`."""
    files = sorted((ROOT / "dpray").rglob("*.py"))
    texts = [path.read_text() for path in files]
    pairs = arrows()
    return {
        "dpray_lines": lines_of("dpray", "**/*.py"),
        "dpray_files": len(files),
        "tests_lines": lines_of("tests", "**/*.py"),
        "docs_lines": lines_of("docs", "*.md"),
        "experiments_lines": lines_of("experiments", "**/*.py"),
        "readme_lines": lines_of(".", "README.md"),
        "rooms": len({room for pair in pairs for room in pair}),
        "arrows": len(pairs),
        "arrows_in_circles": in_circles(pairs),
        "inner_imports": sum(len(list(inner_imports(ast.parse(text)))) for text in texts),
        "any": sum(len(re.findall(r"\bAny\b", text)) for text in texts),
    }


if __name__ == "__main__":
    for name, number in measure().items():
        print(f"{name} = {number}")
