"""`dpray report` shows a finished run as one HTML page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dpray.commands.plan import AsJson
from dpray.report.page import write_report
from dpray.report.review import write_review
from dpray.terminal import one_line


def report(
    run_dir: Annotated[Path, typer.Argument(help="Output folder of a run.")],
    public: Annotated[
        bool, typer.Option(help="Leave out what was computed from private data.")
    ] = False,
    review: Annotated[
        str | None,
        typer.Option(
            metavar="TOOL",
            help="Also write a sample of the texts for people to judge: label-studio or argilla.",
        ),
    ] = None,
    records: Annotated[int, typer.Option(min=1, help="With --review: its number of texts.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Write RUN_DIR/privacy_report.html, one page that opens anywhere.

    If the run was evaluated, RUN_DIR/private also gets a page with the evaluation.
    """
    sample = None if review is None else write_review(run_dir, review, records)
    path, private_path = write_report(run_dir, public)
    if as_json:
        found = {"path": path, "private_path": private_path, "review": sample}
        typer.echo(json.dumps(found, default=str))
        return
    if sample is not None:
        typer.echo(one_line(f"Written to {sample}"))
    typer.echo(one_line(f"Written to {path}"))
    if private_path is not None:
        typer.echo(
            one_line(f"Written to {private_path}: with the evaluation, PRIVATE, not for release")
        )
