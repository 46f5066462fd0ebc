"""`dpray preview` shows what the public prompts give before anything is charged."""

from __future__ import annotations

import gc
import json
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

import dpray
from dpray.commands.plan import AsJson, ConfigFile, Overrides, is_alone
from dpray.terminal import Terminal, printable, progress_bar
from dpray.types import Json


def preview(
    context: typer.Context,
    config: ConfigFile,
    overrides: Overrides = None,
    records: Annotated[int, typer.Option(min=1, max=10_000, help="The number of texts.")] = 5,
    write: Annotated[
        bool,
        typer.Option(
            "--write", help="Also write OUTPUT/floor.jsonl, for `dpray evaluate --floor`."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write some texts without the private records: no data is opened, nothing is charged.

    Shows the prompt, the texts, their time, what the run will take, and what to change.
    """
    if is_alone(context):
        gc.disable()  # what there is to collect are the libraries of models, which stay
    loaded = dpray.load(config, *overrides or [])
    with progress_bar("planning") as on_progress:
        found = dpray.preview(loaded, on_progress, records=records, write=write)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        show_preview(found, [config, *(overrides or [])], Terminal())
    if is_alone(context):
        end_process()


def end_process() -> None:
    """End a process that has closed its engine and printed everything. Python would take apart what
    torch and transformers made at their import, object by object, which takes two seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def show_preview(found: Json, arguments: Sequence[str], console: Terminal) -> None:
    """Print what `dpray.preview` returns; `arguments` are those of a command that runs it."""
    console.note("dpray preview", "bold", "texts without private records; nothing is charged")
    prompt = found["prompt"]
    console.say(Text(printable(f"Prompt, as {found['model']} gets it:"), "bold"))
    for line in filter(None, (prompt["system"], prompt["user"], prompt["prefix"])):
        console.say(line, style="dim", highlight=False)
    console.print()
    for each in found["texts"]:
        of = [] if each["label"] is None else [str(each["label"])]
        of += [f"{name}: {value}" for name, value in each["attributes"].items()]
        name = Text(printable(", ".join(of) or "text"), "bold")
        cut = " [cut]" if each["cut"] else ""
        console.say(name, f"{each['text'] or '(empty)'}{cut}", sep=": ")
    console.print()
    console.say(
        f"{len(found['texts'])} texts, {found['tokens_per_text']:.0f} tokens and "
        f"{found['seconds_per_text']:.2g} s each, by {found['engine']}; {found['cut']} cut; the "
        f"model was loaded in {found['seconds_to_load']:.0f} s"
    )
    if (bits := found["bits"]) is not None:
        line = f"{bits['per_byte']:.2f} bits for a byte of {bits['of']}"
        console.print(f"The model needs {line} (at most {bits['most']:g} if it knows it)")
    for name, line in found["run"].items():
        measured = f"; {found['speed']}" if name == "time" else ""
        console.plain(f"The run, {name}: {line}{measured}")
    for each in found["warnings"]:
        console.note("warning", "yellow", each)
    for each in found["advice"]:
        console.note("change", "yellow", each)
    if found["floor"] is not None:
        floor, run = shlex.quote(found["floor"]), shlex.quote(found["output"])
        console.plain(
            f"Written to {floor}. After the run: dpray evaluate --real FILE --synthetic {run} "
            f"--floor {floor} --out {run}/private"
        )
    elif found["tunes"]:
        console.plain(
            "The model wrote these before it is tuned. They show whether it knows the language; "
            f"the run's texts read like your records: dpray run {shlex.join(arguments)}"
        )
    else:
        console.plain(
            f"If they read like your kind of text: dpray run {shlex.join(arguments)}; "
            "if not: docs/bad_texts.md"
        )
