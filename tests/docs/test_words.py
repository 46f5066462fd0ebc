"""The words of the package: docstrings are sentences, and names are the field's."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dpray"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("*/README.md")])

# A docstring that begins so has no subject and verb of its own.
BEGINNINGS = ("Holds", "Says", "Of", "What", "How", "Where", "Which", "Whether")
PHRASES = re.compile(
    r"(?<!there )\bis none\b|\bare none of\b|\bhas since\b|\banew\b|\bwhoever\b|\bmended\b"
    r"|\bbeside\b|\bnobody's\b|\b(come|comes|came) to (its end|pass)\b"
    r"|\bis there then\b|\bowner alone\b",
    re.IGNORECASE,
)
"""Words and phrases that other code and manuals do not use."""
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


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every literal, parts of f-strings too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def lines(page: Path) -> Iterator[tuple[int, str]]:
    return enumerate(page.read_text(encoding="utf-8").splitlines(), start=1)


def test_words_are_idiomatic() -> None:
    texts = [
        (name, line, text)
        for name, source in sources()
        for line, text in [*messages(source), *comments(source)]
    ]
    texts += [(page.name, *numbered) for page in PAGES for numbered in lines(page)]
    found = [
        f"{name}:{line}: {match.group()}"
        for name, line, text in texts
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
