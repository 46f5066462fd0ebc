"""The terminal of all commands: a console that prints strings literally, tables, a progress bar."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from dpray.types import CONTROL, OnProgress, Progress

_UNPRINTABLE = re.compile(
    rf"[{CONTROL}"
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction of writing
    r"\u2028\u2029]"  # line and paragraph separators
)


def printable(text: str) -> str:
    """Return the text for a terminal, with U+FFFD for lone surrogates, for control characters,
    which could rewrite other lines, and for marks that change the direction of writing."""
    return _UNPRINTABLE.sub("\ufffd", text)


def one_line(text: str) -> str:
    """Return the printable text in one line."""
    return " ".join(printable(text).split("\n"))


def add_or_remove(privacy_unit: str) -> str:
    """Return the difference between neighbouring data sets, in words."""
    return f"add or remove {'one record' if privacy_unit == 'record' else privacy_unit}"


class Terminal(Console):
    """A console that takes no string for markup: a data set may be called "[/bold]", and a text may
    hold escape sequences. dpray itself uses `Text` for bold and colour."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def note(self, word: str, style: str, text: str) -> None:
        """Print `word: text` in one line, the word in a style."""
        self.print(Text(word, style), text, sep=": ", soft_wrap=True)


def titled_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[RenderableType]]
) -> Table:
    """Make a table with words in the first column and numbers in the others."""
    table = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        # A name that is too long for its column is continued in the next line.
        table.add_column(column, justify="right" if place else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


@contextmanager
def progress_bar(activity: str = "", *, transient: bool = True) -> Iterator[OnProgress]:
    """Draw a progress bar of public quantities on stderr while the block runs. Yields the function
    that moves it, for use as `on_progress`. There is no bar if stderr is no terminal; a `transient`
    bar is erased at the end."""
    console = Terminal(stderr=True)
    bar = Bar(
        TextColumn("{task.fields[activity]}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[detail]}", markup=False),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=transient,
    )
    with bar:
        task = bar.add_task("", total=None, activity=activity, detail="")

        def show(progress: Progress) -> None:
            bar.tasks[task].total = progress.total  # `update` takes None for no change
            bar.update(
                task,
                activity=progress.activity,
                completed=progress.completed,
                detail=progress.detail,
            )

        yield show
