"""`dpray card` describes a release for those who get it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dpray.commands.plan import AsJson
from dpray.terminal import one_line


def card(
    run_dir: Annotated[Path, typer.Argument(help="Output folder of a finished run.")],
    name: Annotated[
        str | None, typer.Option(help="The data set's name; otherwise the one in the ledger.")
    ] = None,
    license: Annotated[
        str,
        typer.Option(
            help="The licence that you release it under, as the hub writes it: cc-by-4.0."
        ),
    ] = "unknown",
    as_json: AsJson = False,
) -> None:
    """Write a dataset card, Croissant metadata and a sheet for NIST SP 800-226 into RUN_DIR.

    All three are made of files that may be released, and may be released themselves.
    """
    from dpray.report.card import write_card

    paths = write_card(run_dir, name, license)
    if as_json:
        typer.echo(json.dumps({"paths": [str(path) for path in paths]}))
        return
    for path in paths:
        typer.echo(one_line(f"Written to {path}"))
