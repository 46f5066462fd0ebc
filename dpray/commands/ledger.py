"""`dpray ledger` creates, raises, shows, verifies and exports the budgets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.progress_bar import ProgressBar
from rich.table import Table

from dpray.accounting.event import NEIGHBORING_RELATION
from dpray.io.files import refuse_cloud
from dpray.ledger.chain import now
from dpray.ledger.ledger import Ledger
from dpray.ledger.store import parse_url
from dpray.runs.privacy_report import REPORT, LedgerEntry, read_report
from dpray.terminal import Terminal, printable
from dpray.types import Budget, InputError, Json, MissingLedger

app = typer.Typer(
    no_args_is_help=True, help="The budgets: what each data set may spend and has spent."
)

Url = Annotated[
    str,
    typer.Option("--ledger", help="sqlite:///ledger.db (one machine) or postgresql://host/name."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@app.command()
def create(
    ledger: Url,
    dataset: Annotated[str, typer.Option(help="The data set's name in the ledger.")],
    epsilon: Annotated[float, typer.Option(help="What all runs together may spend.")],
    delta: Annotated[
        float,
        typer.Option(help="Their deltas together: with basic, three runs at 1e-6 take 3e-6."),
    ],
    composition: Annotated[
        str, typer.Option(help="basic: sums over the runs; renyi: a filter at one Renyi order.")
    ] = "basic",
    unit: Annotated[
        str | None,
        typer.Option(help="The column that names the privacy unit (data.unit); none: a record."),
    ] = None,
    order: Annotated[
        float | None, typer.Option(help="The Renyi order; by default a good one is chosen.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Give a data set its budget; make the ledger if it does not exist."""
    # Late: `show` needs nothing of a plan, which imports Ray and the accountant.
    from dpray.runs.plan import privacy_unit

    opened, budget = Ledger.create_or_open(ledger), Budget(epsilon, delta)
    stated_for = (privacy_unit(unit), NEIGHBORING_RELATION)
    opened.create_dataset(dataset, budget, *stated_for, composition, order)
    account = opened.account(dataset)
    assert account is not None
    # An earlier call may have spelled the name differently: show the ledger's spelling.
    message = f"data set '{account.dataset}' has the budget {budget} in {opened}"
    terms = {"dataset": account.dataset, **account.terms()}
    typer.echo(json.dumps(terms) if as_json else printable(message))


@app.command("raise")
def raise_budget(
    ledger: Url,
    dataset: Annotated[str, typer.Option(help="The data set's name in the ledger.")],
    reason: Annotated[str, typer.Option(help="Why, in a sentence; it is kept in the ledger.")],
    epsilon: Annotated[
        float | None, typer.Option(help="The new budget of all runs; none: as it is.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="The new delta of all runs; none: as it is.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Raise the budget of a data set, on record. The guarantee becomes weaker for everything that
    was released from it before, too."""
    if epsilon is None and delta is None:
        raise InputError("--epsilon, --delta: give the new budget")
    opened = Ledger.open(ledger)
    account = opened.raise_budget(dataset, reason, epsilon=epsilon, delta=delta)
    message = (
        f"data set '{account.dataset}' has the budget {account.budget} in {opened} now. It is the "
        "guarantee of all releases from this data set together, of those made before too"
    )
    terms = {"dataset": account.dataset, **account.terms()}
    typer.echo(json.dumps(terms) if as_json else printable(message))


@app.command()
def show(
    ledger: Url,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page with charts to this file, which needs no network."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the budget of every data set, what it has spent and what is left."""
    if html is not None:
        refuse_cloud(html, "--html")
    try:
        shown = Ledger.open(ledger).show()
    except MissingLedger:
        raise InputError(
            f"there is no ledger at {parse_url(ledger).render_as_string()} yet, and nothing was "
            "charged to it: the first run makes it, or `dpray ledger create`"
        ) from None
    if html is not None:
        # Late: most commands draw nothing.
        from dpray.report.page import render_ledger

        try:
            html.write_text(render_ledger(shown, now()), encoding="utf-8")
        except OSError as error:
            raise InputError(f"--html {html}: {error.strerror}") from error
        typer.echo(json.dumps({"html": str(html)}) if as_json else f"Written to {html}")
    elif as_json:
        typer.echo(json.dumps(shown))
    else:
        show_budgets(shown["datasets"], Terminal())


@app.command()
def verify(
    ledger: Url,
    contains: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN_DIR",
            help="A run's folder: check that the ledger has the entry that the run's report names. "
            "A ledger that was put back to an earlier state lacks it. May be given several times.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Recompute every hash, cost and total. Exit code 2 if something does not fit."""
    opened = Ledger.open(ledger)
    found = {str(run): opened.holds(*_last_entry(run)) for run in contains or []}
    problems = opened.verify() + [
        f"{run}: the ledger does not hold the entry that the run's report names as its last one: "
        "it is another ledger, or was put back to an earlier state"
        for run, held in found.items()
        if not held
    ]
    if as_json:
        typer.echo(json.dumps({"problems": problems} | ({"contains": found} if found else {})))
    else:
        typer.echo(
            printable("\n".join(problems)) or "the ledger is as it was written; every total fits"
        )
    if problems:
        raise InputError(f"problems found in the ledger: {len(problems)}")


@app.command()
def export(ledger: Url, as_json: AsJson = False) -> None:
    """Print every entry, one JSON object per line, in the order of its chain."""
    for row in Ledger.open(ledger).export():
        typer.echo(json.dumps(row))


def _last_entry(run_dir: Path) -> tuple[str, int, str]:
    """Return data set, sequence number and hash of a run's last ledger entry, from its report."""
    entry = read_report(run_dir / REPORT).ledger
    match entry:
        case LedgerEntry(dataset=dataset, sequence=int(sequence), head=str(head)) if (
            dataset.isprintable()  # what a database can be asked for
        ):
            return dataset, sequence, head
    raise InputError(
        f"{run_dir}: the report does not name the run's last entry in a ledger: nothing was "
        "charged for the run, or an older version of dpray made it"
    )


def show_budgets(datasets: list[Json], console: Terminal) -> None:
    """Print the budgets of all data sets, and the runs on each."""
    table = Table(title="Budgets (epsilon / delta)")
    table.add_column("data set", overflow="fold")
    for heading in ("budget", "spent", "left"):
        table.add_column(heading, justify="right")
    table.add_column("spent", min_width=16)
    for dataset in datasets:
        rule = dataset["composition"] + (f" {dataset['order']:g}" if dataset["order"] else "")
        name = f"{dataset['dataset']}\nper {dataset['privacy_unit']}, {rule}"
        budget, spent = dataset["budget"], dataset["spent"]
        bar = ProgressBar(total=budget["epsilon"], completed=spent["epsilon"], width=16)
        table.add_row(name, *map(_pair, (budget, spent, dataset["left"])), bar)
    console.print(table)
    for dataset in datasets:
        for raised in dataset["raises"]:
            console.say(
                f"'{dataset['dataset']}' was raised to {_pair(raised['budget'])} at "
                f"{raised['at'][:16].replace('T', ' ')} UTC: {raised['reason']}"
            )
        if dataset["entries"]:
            console.print(_runs(dataset))
    if not any(dataset["entries"] for dataset in datasets):
        console.print("No run is charged yet.")


def _runs(dataset: Json) -> Table:
    table = Table(title=f"Runs on '{dataset['dataset']}'")
    table.add_column("run", overflow="fold")
    for heading in ("reserved (UTC)", "asked", "batches", "state"):
        table.add_column(heading)
    for run in dataset["entries"]:
        batches = run["batches"]
        number = "none started"
        if batches["started"]:
            number = f"{batches['published']} of {batches['started']} published"
        if batches["failed"]:
            number += f", {batches['failed']} failed"
        reserved = run["at"][:16].replace("T", " ")
        state = "finished" if batches["committed"] else "open"
        table.add_row(run["key"], reserved, _pair(run), number, state)
    return table


def _pair(budget: dict[str, float]) -> str:
    return f"{budget['epsilon']:.6g} / {budget['delta']:.3g}"
