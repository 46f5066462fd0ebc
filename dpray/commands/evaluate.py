"""`dpray evaluate` measures synthetic records against real ones; it is not private."""

from __future__ import annotations

import json
from collections.abc import Iterator
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

import dpray
from dpray.evaluation.settings import EvaluationSettings
from dpray.report.tables import evaluation_tables
from dpray.terminal import Terminal, progress_bar, titled_table
from dpray.types import Json


def evaluate(out: Path, as_json: bool, **keys: Any) -> None:
    """Compare synthetic records with real ones. The result is NOT private: do not share it."""
    with progress_bar() as on_progress:
        result = dpray.evaluate(out=out, on_progress=on_progress, **keys)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        show_evaluation(result, out / "evaluation.json")


def _options() -> Iterator[Parameter]:
    """Yield an option for each key of the settings, and `--json`."""
    for name, field in EvaluationSettings.model_fields.items():
        key = field.alias or name
        option = typer.Option(
            f"--{key.replace('_', '-')}",  # alone: a flag has no --no-...
            help=escape(field.description or ""),
            min=next((limit.ge for limit in field.metadata if hasattr(limit, "ge")), None),
        )
        required = field.is_required() or name == "out"
        yield Parameter(
            key,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if required else field.default,
            annotation=Annotated[field.annotation, option],
        )
    option = typer.Option("--json", help="Print evaluation.json itself, for programs.")
    yield Parameter(
        "as_json", Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, option]
    )


def show_evaluation(result: Json, path: Path) -> None:
    """Print all tables but that of the topics, whose terms are words of private texts."""
    console = Terminal()
    console.note("NOT PRIVATE", "bold", f"{result['private']}.")
    for part, table in evaluation_tables(result).items():
        if part != "topics":
            console.print(titled_table(table.caption, table.columns, table.rows))
    for warning in result["warnings"]:
        console.plain(f"Note: {warning}.")
    console.say(f"Written to {path}, with {len(result['topics'])} topics and their shares")
    console.note("In short", "bold", result["summary"])


evaluate.__signature__ = Signature([*_options()])  # type: ignore[attr-defined]
