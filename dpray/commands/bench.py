"""`dpray bench` measures how long a plan takes on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from dpray import api
from dpray.commands.plan import (
    AsJson,
    ConfigFile,
    Overrides,
    PublicFile,
    Rate,
    show_comparison,
    time_in_words,
)
from dpray.config.config import load_config
from dpray.planning.pace import RECORDS, TEXTS
from dpray.progress import progress_bar
from dpray.report.figures import duration
from dpray.terminal import Terminal


def bench(
    config: ConfigFile,
    overrides: Overrides = None,
    public: PublicFile = ...,  # type: ignore[assignment]
    records: Annotated[
        int, typer.Option(help="Records of the larger runs; more are slower, and more exact.")
    ] = RECORDS,
    texts: Annotated[
        int, typer.Option(help="Texts of the shorter runs; more are slower, and more exact.")
    ] = TEXTS,
    rate: Rate = None,
    as_json: AsJson = False,
) -> None:
    """Make short runs on public records, and keep how long they took, for `dpray plan`. With
    method.name=auto, measure every method and chain as it would be chosen, and show the comparison.
    Opens no private data and charges no privacy budget; an endpoint is called for real."""
    loaded = load_config(config, overrides or [])
    sizes = {"records": records, "texts": texts}
    if loaded.method.name == "auto":
        with progress_bar() as on_progress:
            compared = api.compare(loaded, on_progress, public=public, **sizes)
        show_comparison(compared, None, rate, as_json)
        return
    with progress_bar() as on_progress:
        pace = api.bench(loaded, public, on_progress, **sizes)
    time = pace.summary(api.plan(loaded), rate)
    if as_json:
        typer.echo(json.dumps({"pace": asdict(pace), "time": time}))
        return
    console = Terminal()
    thousands = {"1,000 records": pace.per_record, "1,000 texts": pace.per_text}
    console.print(f"start: {duration(pace.start)}", highlight=False)
    for name, seconds in thousands.items():
        words = duration(1000 * seconds) if seconds else "too little to measure"
        console.print(f"{name}: {words}", highlight=False)
    console.print(f"the plan: {time_in_words(time)}", highlight=False, soft_wrap=True)
