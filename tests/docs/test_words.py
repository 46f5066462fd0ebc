"""The words of the package: docstrings are sentences, and names are the field's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dpray"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("*/README.md")])

# A docstring that begins so has no subject and verb of its own.
BEGINNINGS = ("Holds", "Says", "Of", "What", "How", "Where", "Which", "Whether")
PHRASES = re.compile(
    r"(?<!there )\bis none\b|\bare none of\b|\bhas since\b|\banew\b|\bwhoever\b|\bmended\b"
    r"|\bbeside\b|\bnobody's\b|\b(?:come|comes|came) to (?:its end|pass)\b"
    r"|\bis there then\b|\bowner alone\b",
    re.IGNORECASE,
)
"""Words and phrases that other code and manuals do not use."""
NAMES = {"again", "Books", "quiet", "REACH", "Shown", "Spread"}


def lines(text: str) -> Iterator[tuple[int, str]]:
    return enumerate(text.splitlines(), start=1)


def wrong_words(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of docstrings, those of variables too, that begin in a wrong way, of
    names that are not the field's, and of literals and comments with a wrong phrase."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                if text.split()[0].rstrip(",:") in BEGINNINGS:
                    yield node.lineno, text[:70]
            case ast.Constant(value=str(text)):
                yield from ((node.lineno, found) for found in PHRASES.findall(text))
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef() if node.name in NAMES:
                yield node.lineno, node.name
            case ast.Name(id=name, ctx=ast.Store()) if name in NAMES:
                yield node.lineno, name
    for number, line in lines(source):
        comment = line.partition("#")[2]
        yield from ((number, found) for found in PHRASES.findall(comment))


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ('"""How it is made."""', "How it is made."),
        ('def f() -> None:\n    """Whether, or not."""', "Whether, or not."),
        ("def again() -> None: ...", "again"),
        ("REACH = 1", "REACH"),
        ("x = f'{1} is mended'", "mended"),
        ("x = 1  # made anew", "anew"),
    ],
)
def test_wrong_words_are_found(source: str, wrong: str) -> None:
    assert [text for _, text in wrong_words(source)] == [wrong]


def test_words_are_idiomatic() -> None:
    """A docstring begins like a sentence, and names are the field's."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(ROOT)
        wrong = [*wrong_words(path.read_text(encoding="utf-8"))]
        found += [f"{name}:{line}: {text}" for line, text in wrong]
        assert path.stem not in NAMES
    for page in PAGES:
        for number, line in lines(page.read_text(encoding="utf-8")):
            found += [f"{page.name}:{number}: {text}" for text in PHRASES.findall(line)]
    assert found == [], "\n" + "\n".join(found)
