"""The bar of commands that work through named parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dpray.commands.terminal import Terminal


@contextmanager
def part_bar() -> Iterator[Callable[[str, int, int | None], None]]:
    """A line on stderr, where that is a terminal. What is yielded takes a part's name (public), how
    much of it is done, and of how much, where that is known."""
    console = Terminal(stderr=True)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=None)

        def show(part: str, done: int, total: int | None) -> None:
            bar.tasks[task].total = total  # `update` takes None for no change
            bar.update(task, description=part, completed=done)

        yield show
