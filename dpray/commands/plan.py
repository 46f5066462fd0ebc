"""`dpray plan` shows what a configuration costs and makes, without touching data."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from dpray import api
from dpray.config.config import load_config
from dpray.terminal import Terminal

ConfigFile = Annotated[str, typer.Argument(help="A YAML file.", metavar="CONFIG")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="key.sub=value settings.", metavar="[KEY=VALUE]...")
]
AsJson = Annotated[bool, typer.Option("--json", help="Answer in JSON, for programs.")]


def plan(config: ConfigFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Show epsilon, delta, batches, tokens, LLM calls and records to expect; opens no data."""
    # Imported late: a mistyped key should not have to wait for torch.
    from dpray.runs.placement import in_words

    made = api.plan(load_config(config, overrides or []))
    summary = made.summary()
    if as_json:
        typer.echo(json.dumps(summary))
        return
    console = Terminal()
    table = Table(title="Plan (no data was opened)", show_header=False, title_justify="left")
    table.add_row("guarantee", _guarantee(summary))
    table.add_row("method", summary["method"]["name"])
    for name, value in made.lines().items():
        table.add_row(name, value)
    table.add_row("model runs", in_words(made.config))
    console.print(table)
    for mechanism in summary["mechanisms"]:
        alone = mechanism["cost"]["epsilon_alone"]
        console.print(f"{mechanism['count']} x {mechanism['name']}: eps {alone:.4f} alone")
    for warning in summary["warnings"]:
        console.note("warning", "yellow", warning)


def _guarantee(summary: dict[str, Any]) -> str:
    if summary["not_private"]:
        return "none: privacy.epsilon is infinite, no noise is added"
    return (
        f"({summary['epsilon']:.4f}, {summary['delta']:g})-DP by the "
        f"{summary['accountant']['bound']} bound, add or remove one {summary['privacy_unit']}"
    )
