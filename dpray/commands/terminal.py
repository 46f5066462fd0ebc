"""The terminal that all commands print to: it shows every string as it stands, and obeys none."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"  # all of C0 but tab and line feed; delete; C1
    r"|[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"  # direction of writing
    r"|[\u2028\u2029\ud800-\udfff]"  # line and paragraph separators; lone surrogates
)


def printable(text: str) -> str:
    """Return the text for a terminal. Control characters, which could move the cursor or rewrite
    what is above, marks that turn the direction of writing, and lone surrogates become U+FFFD."""
    return _CONTROL.sub("\ufffd", text)


def one_line(text: str) -> str:
    """Return the text for a terminal, in one line."""
    return " ".join(printable(text).split("\n"))


class Terminal(Console):
    """A console whose strings are no markup: a data set may be called "[/bold]" and a text may hold
    escape sequences. What dpray itself sets in bold or colour it gives as `Text`."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def note(self, word: str, style: str, text: str) -> None:
        """Print a line that begins with a word in a style."""
        self.print(Text(word, style), text, sep=": ", soft_wrap=True)


def titled_table(title: str, *columns: str) -> Table:
    """Make a table whose first column holds words and whose others hold numbers."""
    table = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    return table
