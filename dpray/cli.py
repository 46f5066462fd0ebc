"""The command line: `dpray COMMAND`. Every command has `--json`; exit codes are the contract's:
0 done, 2 bad input or configuration, 3 budget refused, 4 finished in part, 1 anything else."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from typer.exceptions import TyperException

from dpray import __version__
from dpray.commands import audit, demo, evaluate, ledger, plan, report, run, serve
from dpray.commands.terminal import one_line
from dpray.types import DprayError

app = typer.Typer(
    name="dpray",
    help="Differentially private synthetic texts, on a laptop or a Ray cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and stop.",
            callback=_show_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    pass


app.command("plan")(plan.plan)
app.command("run")(run.run)
app.command("evaluate")(evaluate.evaluate)
app.command("audit")(audit.audit)
app.command("serve")(serve.serve)
app.command("report")(report.report)
app.command("demo")(demo.demo)
app.add_typer(ledger.app, name="ledger", help="Budgets: create, show, verify, export.")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    sys.exit(run_command(arguments))


def run_command(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code. An error is one line on stderr; an unexpected
    one names its class only, because its text could hold private text."""
    try:
        result = typer.main.get_command(app)(args=arguments, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except TyperException as error:
        # No message: the help was shown, for want of a command.
        if message := error.format_message():
            typer.echo(one_line(f"dpray: {message}"), err=True)
        return 2
    except (typer.Abort, KeyboardInterrupt):
        typer.echo("dpray: interrupted", err=True)
        return 1
    except DprayError as error:
        typer.echo(one_line(f"dpray: {error}"), err=True)
        return error.exit_code
    except Exception as error:
        typer.echo(f"dpray: unexpected {type(error).__name__} at {_place(error)}", err=True)
        return 1


def _place(error: BaseException) -> str:
    """File and line of our own code that raised: public, unlike the error's text."""
    place = "?"
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__", "")
        if name.startswith("dpray"):
            place = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
