"""`dpray check` reads all rows before a run, for their owner alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer

import dpray
from dpray.commands.plan import AsJson, ConfigFile, Overrides
from dpray.progress import progress_bar
from dpray.terminal import Terminal, titled_table
from dpray.types import InputError


def check(
    config: ConfigFile,
    overrides: Overrides = None,
    write: Annotated[
        bool,
        typer.Option("--write", help="Also write OUTPUT/private/check.json, for the owner alone."),
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Read all rows as a run will: errors by row, types, lengths, labels, texts that will be cut.
    The counts are exact, so for the owner alone; nothing is charged. Exit code 2 if a row would end
    a run."""
    loaded = dpray.load(config, *overrides or [])
    with progress_bar("planning") as on_progress:
        found = dpray.check(loaded, on_progress, write=write)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        show_check(found, Terminal())
    return InputError.exit_code if found["refused"] else 0


def show_check(found: dict[str, Any], console: Terminal) -> None:
    console.note("dpray check", "bold", found["notice"])
    skipped = f", {found['skipped']:,} left out as empty" if found["skipped"] else ""
    console.print(
        f"{found['rows']:,} rows, {found['records']:,} records{skipped}; data.public_size is "
        f"{found['public_size']:,}, a public number: leave it, unless you know better without "
        "this count",
        soft_wrap=True,
    )
    for error in found["errors"]:
        more = error["count"] - len(error["first"])
        places = "; ".join(error["first"]) + (f" and {more:,} more" if more and more > 0 else "")
        where = f" ({places})" if error["first"] else ""
        console.note("error", "red", f"{error['count']:,} x {error['reason']}{where}")
    if found["types"]:
        rows = [(name, _counts(kinds)) for name, kinds in found["types"].items()]
        console.print(titled_table("Types", ("column", "rows"), rows))
    if found["labels"]:
        console.print(titled_table("Labels", ("label", "rows"), _labels(found)))
    lengths = {"characters": found["characters"]}
    lengths |= {f"tokens for {each['key']}": each["tokens"] for each in found["limits"]}
    shares = [*found["characters"]]
    table = [(name, *(f"{n:,}" for n in each.values())) for name, each in lengths.items()]
    if shares:
        console.print(titled_table("Lengths of the texts", ("", *shares), table))
    for limit in found["limits"]:
        console.print(
            f"{limit['cut']:,} texts will be cut to {limit['most']:,} tokens ({limit['key']})",
            soft_wrap=True,
        )
    if found["tokens_not_counted"]:
        console.note("tokens are not counted", "yellow", found["tokens_not_counted"])
    for proposal in found["proposals"]:
        console.note(
            "proposal", "yellow", f"{proposal['key']}={proposal['value']}: {proposal['why']}"
        )
    if any(proposal["key"].startswith("method") for proposal in found["proposals"]):
        console.print("A proposed length follows from private rows, and what you set is released.")
    if found["refused"]:
        console.note("refused", "red", "a run would end at such a row; nothing was charged")
    else:
        console.note("ok", "green", "a run can read every row")


def _counts(kinds: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())


def _labels(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, count in found["labels"].items():
        yield name, f"{count:,}"
    if found["other_labels"] is None:
        yield "not in data.labels", "many values; is data.label the right column?"
        return
    for name, count in found["other_labels"].items():
        yield f"{name} (not in data.labels)", f"{count:,}"
