"""`dpray card` describes a release for those who get it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dpray.commands.plan import AsJson
from dpray.report.card import license_there, share, write_card
from dpray.terminal import one_line
from dpray.types import InputError


def card(
    run_dir: Annotated[Path, typer.Argument(help="Output folder of a finished run.")],
    name: Annotated[
        str | None, typer.Option(help="The data set's name; otherwise the one in the ledger.")
    ] = None,
    license: Annotated[
        str | None,
        typer.Option(
            help="The licence that you release it under, as a hub or SPDX writes it: cc-by-4.0. "
            "Otherwise the one on the card that is there."
        ),
    ] = None,
    push_to_hub: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME",
            help="Upload the release to this data set of a hub, which only you can read.",
        ),
    ] = None,
    public: Annotated[
        bool,
        typer.Option("--public", help="With --push-to-hub: everybody can read it."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a dataset card, Croissant metadata and a sheet for NIST SP 800-226 into RUN_DIR.

    All three are made of files that may be released, and may be released themselves. With
    --push-to-hub they are uploaded with the texts, the table, the report and the model; nothing
    else in RUN_DIR is.
    """
    if push_to_hub is None:
        if public:
            raise InputError("--public: only with --push-to-hub")
        paths, url = write_card(run_dir, name, license), None
    else:
        paths, url = share(run_dir, push_to_hub, name=name, license=license, public=public)
    if as_json:
        typer.echo(json.dumps({"paths": [str(path) for path in paths], "url": url}))
        return
    for path in paths:
        typer.echo(one_line(f"Written to {path}"))
    if url is not None:
        readers = "everybody" if public else "its owner only"
        shown = f"Uploaded to {url}, for {readers}; licence: {license_there(run_dir)}"
        typer.echo(one_line(shown))
