"""One bar shows the progress of every command that takes long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from dpray.terminal import Terminal
from dpray.types import OnProgress, Progress


@contextmanager
def progress_bar(activity: str = "", *, transient: bool = True) -> Iterator[OnProgress]:
    """Draw a bar of public quantities on stderr while the block runs, and yield the function that
    moves it, to be given as `on_progress`. There is no bar if stderr is no terminal; a
    `transient` bar is erased at the end."""
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
