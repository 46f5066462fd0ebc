"""`dpray run`: the method of a configuration, from its charge to its release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.text import Text

from dpray.commands.plan import AsJson, ConfigFile, Overrides
from dpray.commands.report import write_report
from dpray.commands.terminal import Terminal
from dpray.config.config import Config, load_config

if TYPE_CHECKING:
    from dpray.types import Progress


def run(config: ConfigFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Make synthetic records; the same command resumes an unfinished run."""
    loaded = load_config(config, overrides or [])
    report = run_with_progress(loaded, Terminal(stderr=True))
    if as_json:
        typer.echo(json.dumps(report | {"output": loaded.output.path}))
    else:
        show_run(report, Path(loaded.output.path), Terminal())


def run_with_progress(config: Config, console: Terminal) -> dict[str, Any]:
    """Run with a bar of public quantities on `console`; writes the HTML report too."""
    # Imported late: a mistyped key should not have to wait for torch and Ray.
    from dpray import registry as methods

    bar = Bar(
        TextColumn("{task.fields[stage]}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[detail]}", markup=False),
        TimeElapsedColumn(),
        console=console,
        # A file or a program gets one line where the run fails, and no picture of a bar.
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=None, stage="loading, charging, starting", detail="")

        def show(progress: Progress) -> None:
            bar.tasks[task].total = progress.total  # `update` takes None for no change
            bar.update(
                task,
                stage=progress.stage,
                completed=progress.completed,
                detail=progress.detail,
            )

        report = methods.run(config, show)
    write_report(Path(config.output.path), public=True)
    return report


def show_run(report: dict[str, Any], folder: Path, console: Terminal) -> None:
    records = Text(f"{report['records']} synthetic records", "bold")
    console.print(records, _how(report), sep="", soft_wrap=True)
    if report["not_private"]:
        console.note("NOT PRIVATE", "bold", "no noise was added; nothing of it may be released")
    else:
        console.print(
            f"Spent: ({report['epsilon']:.4f}, {report['delta']:g})-DP, "
            f"add or remove one {report['privacy_unit']}; left on "
            f"'{report['ledger']['dataset']}': eps {report['ledger']['left']['epsilon']:.4g}",
            soft_wrap=True,
        )
        if report["ledger"].get("made_by_this_run"):  # older versions did not say
            console.print("A new ledger was made: it knows of no other release of this data")
    for name in ("synthetic.jsonl", "privacy_report.html"):
        console.print(f"  {folder / name}", highlight=False, soft_wrap=True)


def _how(report: dict[str, Any]) -> str:
    """What the method counted on the way."""
    parts = []
    if batches := report.get("batches"):
        parts.append(
            f" from {batches['published']} of {batches['total']} batches "
            f"({batches['repeated']} repeated, {batches['dropped']} dropped)"
        )
    if (tokens := report.get("tokens")) and tokens["total"]:
        share = tokens["private"] / tokens["total"]
        parts.append(f"; {share:.0%} of {tokens['total']} tokens are private")
    if calls := report.get("calls"):
        parts.append(
            f" from {calls['calls']} calls of the language model "
            f"({calls['prompt_tokens']} tokens read, {calls['completion_tokens']} written)"
        )
    return "".join(parts)
