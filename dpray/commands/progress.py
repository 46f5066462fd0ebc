"""Commands that take minutes show a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dpray.commands.terminal import Terminal


@contextmanager
def part_bar(
    first: str = "", *, console: Terminal | None = None, transient: bool = True
) -> Iterator[Callable[..., None]]:
    """Show a line on stderr, where that is a terminal. It yields a function of a part's name
    (public), how much of the part is done, of how much (None: unknown), and a word on it."""
    console = console or Terminal(stderr=True)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[detail]}", markup=False),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=transient,
    )
    with bar:
        task = bar.add_task(first, total=None, detail="")

        def show(part: str, done: int, total: int | None, detail: str = "") -> None:
            bar.tasks[task].total = total  # `update` takes None for no change
            bar.update(task, description=part, completed=done, detail=detail)

        yield show
