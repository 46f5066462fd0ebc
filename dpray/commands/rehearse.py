"""`dpray rehearse` tries the methods on public records and recommends the best one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import dpray
from dpray.commands.plan import AsJson, ConfigFile, Overrides, PublicFile, check_new, write_config
from dpray.terminal import Terminal, progress_bar, titled_table
from dpray.types import InputError, ReadOnlyJson

if TYPE_CHECKING:
    from dpray.evaluation.rehearse import Rehearsal


def rehearse(
    config: ConfigFile,
    overrides: Overrides = None,
    public: PublicFile = ...,  # type: ignore[assignment]
    epsilon: Annotated[
        list[float] | None,
        typer.Option(help="Epsilon to try instead of privacy.epsilon; may be given several times."),
    ] = None,
    records: Annotated[
        int, typer.Option(help="Texts of each run that are scored; Aug-PE makes all of its own.")
    ] = 100,
    method: Annotated[
        list[str] | None,
        typer.Option(help="Only this method, even if its signal is below its noise; may be given "
                          "several times."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the runs, which the same command resumes; by default "
                          "`rehearsal` next to output.path."),
    ] = None,
    write: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Write the configuration of the best method to this new file."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Run the methods on public records of the same shape, with real noise, and score their
    releases. Opens no private data, charges no budget. Writes rehearsal.json and rehearsal.html."""
    loaded = dpray.load(config, *overrides or [])
    check_new(write)
    if write is not None and len(epsilon or []) > 1:
        raise InputError("--write: takes one --epsilon")
    folder = out or Path(loaded.output.path).parent / "rehearsal"
    options = {"epsilons": epsilon or [], "records": records, "methods": method or []}
    with progress_bar() as on_progress:
        rehearsed = dpray.rehearse(loaded, public, folder, on_progress, **options)
    if write is not None:
        (tried,) = rehearsed.found
        write_config(write, rehearsed.tree(tried))
    if as_json:
        typer.echo(json.dumps(rehearsed.summary()))
        return
    show_rehearsal(rehearsed, Terminal())
    Terminal().plain(f"  {folder / 'rehearsal.html'}")


def show_rehearsal(rehearsed: Rehearsal, console: Terminal) -> None:
    """Print the scores and the best method at each epsilon."""
    public = rehearsed.public
    title = (
        f"{public['drawn']:,} records drawn from {public['records']:,} public ones, scored by "
        f"{public['test_records']:,} others (no private data was opened, nothing was charged)"
    )
    measures = rehearsed.measures
    columns = ("epsilon", "method", "records", *(name.replace("_", " ") for name in measures))
    rows = [
        [f"{epsilon:g}", *_row(name, one.scores, measures)]
        for epsilon, methods in rehearsed.found.items()
        for name, one in methods.items()
        if one.scores is not None
    ]
    real = ["", *_row("real records", rehearsed.real, measures)]
    console.print(titled_table(title, columns, [*rows, real]))
    for epsilon, methods in rehearsed.found.items():
        for name, one in methods.items():
            if one.why_not is not None:
                console.note(f"{name} at eps {epsilon:g}", "yellow", one.why_not)
        best, as_good = rehearsed.best(epsilon), rehearsed.as_good(epsilon)
        colour = "green" if best and not as_good else "yellow"
        more = f"; within chance of it: {', '.join(as_good)}" if as_good else ""
        console.note(f"best at eps {epsilon:g}", colour, (best or "no method was tried") + more)


def _row(name: str, scores: ReadOnlyJson, measures: list[str]) -> Iterator[str]:
    yield name
    yield f"{scores['records']:,}"
    for measure in measures:
        yield f"{scores[measure]['mean']:.3f} +- {scores[measure]['deviation']:.3f}"
