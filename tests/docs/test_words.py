"""The words of the package: docstrings are sentences, and names are the field's."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "dpray"

# A docstring that begins so has no subject and verb of its own.
BEGINNINGS = ("Holds", "Says", "Of", "What", "How", "Where", "Which", "Whether")
PHRASES = re.compile(r"(?<!there )\bis none\b|\bare none of\b|\bhas since\b", re.IGNORECASE)
NAMES = {"again", "Books", "quiet", "REACH", "Shown", "Spread"}


def sources() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE.parent)), path.read_text(encoding="utf-8")


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every docstring, those of variables too."""
    for node in ast.walk(ast.parse(source)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.lineno, " ".join(value.value.split())


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def defined_names(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def test_docstrings_begin_like_sentences() -> None:
    found = [
        f"{name}:{line}: {text[:70]}"
        for name, source in sources()
        for line, text in docstrings(source)
        if text.split(" ")[0].rstrip(",:") in BEGINNINGS
    ]
    assert found == [], "\n" + "\n".join(found)


def test_words_are_idiomatic() -> None:
    found = [
        f"{name}:{line}: {match.group()}"
        for name, source in sources()
        for line, text in [*docstrings(source), *comments(source)]
        for match in PHRASES.finditer(text)
    ]
    assert found == [], "\n" + "\n".join(found)


def test_names_are_the_fields() -> None:
    found = [
        f"{name}:{line}: {defined}"
        for name, source in sources()
        for line, defined in [*defined_names(source), (0, Path(name).stem)]
        if defined in NAMES
    ]
    assert found == [], "\n" + "\n".join(found)
