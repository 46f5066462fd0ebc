"""The terminal of all commands: a console that prints strings literally, tables, a progress bar,
and plain lines in place of the bar if there is no terminal."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
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

    def say(self, *parts: str | Text, **options: Any) -> None:
        """Print the parts of a line, and leave to the terminal where a long one is continued."""
        self.print(*parts, soft_wrap=True, **options)

    def plain(self, text: str) -> None:
        """Print a line without colours."""
        self.say(text, highlight=False)

    def note(self, word: str, style: str, text: str) -> None:
        """Print `word: text`, the word in a style."""
        self.say(Text(word, style), text, sep=": ")


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


QUIET_SECONDS, LINE_SECONDS = 10.0, 30.0
"""A log has no line in the first seconds, so that a short command prints only its result; then one
at each change of activity, and one after so many seconds without a line."""

LAST_SECONDS = 10.0
"""A command that has ended waits this long for the last lines of its log."""


Actors = tuple[int, int]
"""A run's own actors that answer, and the most that it may have."""


class ProgressLog:
    """Writes lines about a long command for the log of a job, with public quantities only. `actors`
    is asked for each line, and returns None for a run without actors. A thread of its own asks and
    writes: the command never waits for a cluster that answers late."""

    def __init__(
        self,
        write: Callable[[str], None],
        activity: str = "starting",
        *,
        as_json: bool = False,
        actors: Callable[[], Actors | None] = lambda: None,
    ) -> None:
        self._write, self._as_json, self._actors = write, as_json, actors
        self._began = self._moved = monotonic()
        self._due = self._began + QUIET_SECONDS
        self._shown, self._now = "", Progress(activity)
        self._given: SimpleQueue[tuple[float, Progress] | None] = SimpleQueue()

    def show(self, progress: Progress) -> None:
        """Take the present progress. A new activity is a line at once, and so is a warning, which
        a short command writes too."""
        self._given.put((monotonic(), progress))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Write what is due while the block runs, and what was shown in it."""
        thread = threading.Thread(target=self._write_due, name="dpray-log", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._given.put(None)
            thread.join(LAST_SECONDS)

    def _write_due(self) -> None:
        while True:
            try:
                given = self._given.get(timeout=max(0.0, self._due - monotonic()))
            except Empty:
                self._write_line()
                continue
            if given is None:
                return
            self._take(*given)

    def _take(self, time: float, progress: Progress) -> None:
        if progress.is_warning:
            elapsed = int(time - self._began)
            if self._as_json:
                self._write(json.dumps({"seconds": elapsed, **vars(progress)}))
            else:
                self._write(f"{timedelta(seconds=elapsed)} {progress.activity}: {progress.detail}")
            return
        before, self._now = self._now, progress
        if (before.activity, before.completed) != (progress.activity, progress.completed):
            self._moved = time
        is_new = progress.activity != self._shown and time >= self._began + QUIET_SECONDS
        if is_new or monotonic() >= self._due:
            self._write_line()

    def _write_line(self) -> None:
        time, now = monotonic(), self._now
        self._shown, self._due = now.activity, time + LINE_SECONDS
        elapsed, still = int(time - self._began), int(time - self._moved)
        alive, asked = self._actors() or (None, None)
        if self._as_json:
            counted = {"actors_alive": alive, "actors_asked": asked, "seconds_since_part": still}
            self._write(json.dumps({"seconds": elapsed, **vars(now), **counted}))
            return
        done = f" {now.completed:,}" if now.completed or now.total else ""
        parts = [f"{now.activity}{done}{f' of {now.total:,}' if now.total else ''}", _detail(now)]
        parts += [] if alive is None else [f"{alive} of {asked} actors alive"]
        if done:
            parts.append(f"the last part {still} s ago")
        elif still >= LINE_SECONDS:
            parts.append(f"for {still} s")
        self._write(f"{timedelta(seconds=elapsed)} {'; '.join(filter(None, parts))}")


def _detail(now: Progress) -> str:
    speed = now.tokens_per_second or 0.0
    digits = 0 if speed >= 10 else 1
    words = f"{speed:,.{digits}f} tokens/s" if speed >= 0.05 else ""
    return ", ".join(filter(None, [now.detail, words]))


def _shown_count(now: Progress) -> str:
    if now.total is not None:
        return f"{now.completed:,}/{now.total:,}"
    return f"{now.completed:,}" if now.completed else ""


@contextmanager
def progress_bar(
    activity: str = "starting",
    *,
    transient: bool = True,
    as_json: bool = False,
    actors: Callable[[], Actors | None] = lambda: None,
) -> Iterator[OnProgress]:
    """Draw a progress bar of public quantities on stderr while the block runs. Yields the function
    that moves it, for use as `on_progress`. A `transient` bar is erased at the end. If stderr is no
    terminal, a `ProgressLog` writes lines there, with `as_json` a JSON object in each, and the
    number of `actors`."""
    console = Terminal(stderr=True)
    if not console.is_terminal:

        def write(line: str) -> None:
            print(printable(line), file=console.file, flush=True)

        log = ProgressLog(write, activity, as_json=as_json, actors=actors)
        with log.running():
            yield log.show
        return
    bar = Bar(
        SpinnerColumn(),  # moves while a long part is under way
        TextColumn("{task.fields[activity]}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[count]}", markup=False),
        TextColumn("{task.fields[detail]}", markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=transient,
    )
    with bar:
        task = bar.add_task("", total=None, activity=activity, count="", detail="")

        def show(progress: Progress) -> None:
            if progress.is_warning:
                console.note(progress.activity, "yellow", progress.detail)
                return
            bar.tasks[task].total = progress.total  # `update` takes None for no change
            bar.update(
                task,
                activity=progress.activity,
                completed=progress.completed,
                count=_shown_count(progress),
                detail=_detail(progress),
            )

        yield show
