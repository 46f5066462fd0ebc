"""The command line is `dpray COMMAND`. Every command has `--json`; exit codes are the contract's:
0 done, 2 bad input or configuration, 3 budget refused, 4 finished in part, 1 anything else."""

from __future__ import annotations

import os
import signal
import sys
from pkgutil import resolve_name
from traceback import walk_tb
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from dpray.terminal import one_line
from dpray.types import DprayError
from dpray.version import __version__

COMMANDS = {
    "init": "Write a configuration with comments, from a file's header and a few answers.",
    "check": "Check all rows before a run. Nothing is charged; do not share the output.",
    "plan": "Say what a run will cost and make. Opens no data.",
    "preview": "Write some texts without the private records. Opens no data, charges nothing.",
    "rehearse": "Try the methods on public records, with real noise. Charges nothing.",
    "run": "Make synthetic records. The same command resumes a run that stopped.",
    "evaluate": "Compare synthetic records with real ones. Do not share the output.",
    "audit": "Attack a plan's noise, and look for secrets that were put into the data.",
    "serve": "Serve the language model and the embedder, until Ctrl+C.",
    "report": "Write a run's privacy report as a page that opens anywhere.",
    "card": "Describe a release for its readers, and upload it if you ask for that.",
    "demo": "Make texts from packaged, fictional clinic notes, in a few minutes.",
    "ledger": "Create, raise, show, verify or export budgets.",
}
"""`dpray --help` shows these lines."""

LEVELS = {"TORCH_CPP_LOG_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error"}
"""Log levels that libraries read when they are imported, which is after a command begins. They show
errors, but no notes on the machine and its devices."""


class Commands(TyperGroup):
    """The group of commands. It imports a command's module when the command is called: the list of
    commands does not wait for torch and Ray."""

    def __init__(self, **options: Any) -> None:
        listed = {name: TyperGroup(name=name, help=line) for name, line in COMMANDS.items()}
        super().__init__(**options | {"commands": listed})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, listed, rest = super().resolve_command(ctx, args)
        return name, listed and load_command(listed.name or ""), rest

    def invoke(self, ctx: Any) -> Any:
        """Run a command. Typer would make an interruption an exit code without a word."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise typer.Abort from error


def load_command(name: str) -> object:
    """Import the command `name`, a function of this name or a group of commands called `app`."""
    module = resolve_name(f"dpray.commands.{name}")
    group = typer.Typer(add_completion=False)
    if hasattr(module, "app"):
        group.add_typer(module.app, name=name, help=COMMANDS[name])
    else:
        group.command(name)(getattr(module, name))
    return typer.main.get_group(group).commands[name]


app = typer.Typer(
    name="dpray",
    cls=Commands,
    help="Differentially private synthetic texts, on a laptop or a Ray cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


_HELP = "Print the version and stop."
_Version = typer.Option("--version", help=_HELP, callback=_show_version, is_eager=True)


@app.callback()
def _root(version: Annotated[bool, _Version] = False) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    interrupt_on_sigterm()
    sys.exit(run_command(arguments, alone=True))


def interrupt_on_sigterm() -> None:
    """Let SIGTERM end a command as Ctrl-C does: a run then tells whether it is charged."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def run_command(arguments: list[str] | None = None, *, alone: bool = False) -> int:
    """Run the command line; return the exit code. `alone` says that the process ends with the
    command."""
    for name, level in LEVELS.items():
        os.environ.setdefault(name, level)
    try:
        command = typer.main.get_command(app)
        result = command(args=arguments, standalone_mode=False, obj={"alone": alone})
    except (Exception, KeyboardInterrupt) as error:
        return show_error(error)
    return result if isinstance(result, int) else 0


def show_error(error: BaseException) -> int:
    """Print an error as one line on stderr and return the exit code. Of an unexpected error, only
    the class and the place are shown, because its message could hold private text. If the error
    ended a run, the line also tells whether the run is charged."""
    code, message = 1, f"unexpected {type(error).__name__} at {_place(error)}"
    if isinstance(error, TyperException):
        code, message = 2, error.format_message()
        if not message:  # there was no command, and the help was shown
            return code
    elif isinstance(error, DprayError):
        code, message = error.exit_code, str(error)
    else:
        if isinstance(error, typer.Abort | KeyboardInterrupt):
            message, error = "interrupted", error.__cause__ or error
        if charge_status := getattr(error, "charge_status", ""):
            message += f"; {charge_status}"
    typer.echo(one_line(f"dpray: {message}"), err=True)
    return code


def _place(error: BaseException) -> str:
    """Return the last module and line of dpray in the traceback. They are public."""
    passed = ((frame.f_globals.get("__name__", ""), n) for frame, n in walk_tb(error.__traceback__))
    places = [f"{module}:{line}" for module, line in passed if module.startswith("dpray")]
    return places[-1] if places else "?"
