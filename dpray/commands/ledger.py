"""`dpray ledger` creates, shows, verifies and exports the budgets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress_bar import ProgressBar
from rich.table import Table

from dpray.accounting.event import NEIGHBORING_RELATION
from dpray.io.files import read_json, refuse_cloud
from dpray.ledger.chain import now
from dpray.ledger.ledger import Ledger
from dpray.terminal import Terminal, printable
from dpray.types import Budget, InputError

app = typer.Typer(no_args_is_help=True, help="The budgets: what each data set may spend and has.")

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
    delta: Annotated[float, typer.Option(help="The delta that all runs share.")],
    composition: Annotated[
        str | None,
        typer.Option(
            help="basic: the runs' sums (the default); renyi: a filter at one Renyi order."
        ),
    ] = None,
    unit: Annotated[
        str | None,
        typer.Option(help="The column that names the privacy unit (data.unit); none: a record."),
    ] = None,
    order: Annotated[
        float | None, typer.Option(help="The order of renyi; without it a good one is chosen.")
    ] = None,
    parent: Annotated[
        str | None,
        typer.Option(
            help="The data set that this one is a subset of, or was made from unit by unit: "
            "whatever is charged to this one is drawn on that one too."
        ),
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(
            help="A team or project: epsilon and delta are then its cap inside the data set's "
            "budget, which has to be there already."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Give a data set its budget; make the ledger if it does not exist. With --tenant, give a
    tenant its part of a data set's budget."""
    if tenant is not None:
        if any(option is not None for option in (composition, unit, order, parent)):
            raise InputError("--tenant: composition, unit, order and parent are the data set's")
        _create_tenant(Ledger.open(ledger), dataset, tenant, Budget(epsilon, delta), as_json)
        return
    # Late: `show` needs nothing of a plan, which imports Ray and the accountant.
    from dpray.runs.plan import privacy_unit

    opened = Ledger.create_or_open(ledger)
    budget = Budget(epsilon, delta)
    stated_for = (privacy_unit(unit), NEIGHBORING_RELATION)
    opened.create_dataset(dataset, budget, *stated_for, composition or "basic", order, parent)
    account = opened.account(dataset)
    assert account is not None
    # The ledger's own spelling decides, which an earlier call may have set.
    said = f"data set '{account.dataset}' has the budget {budget} in {opened}"
    terms = {"dataset": account.dataset, **account.terms()}
    typer.echo(json.dumps(terms) if as_json else printable(said))


def _create_tenant(
    opened: Ledger, dataset: str, tenant: str, budget: Budget, as_json: bool
) -> None:
    opened.create_tenant(dataset, tenant, budget)
    said = f"tenant '{tenant}' has {budget} of the budget of '{dataset}' in {opened}"
    terms = {"dataset": dataset, "tenant": tenant, "budget": vars(budget)}
    typer.echo(json.dumps(terms) if as_json else printable(said))


@app.command()
def show(
    ledger: Url,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page with charts to this file, which needs no network."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what every data set may spend, has spent and has left."""
    if html is not None:
        refuse_cloud(html, "--html")
    shown = Ledger.open(ledger).show()
    if html is not None:
        _write_page(shown, html)
        typer.echo(json.dumps({"html": str(html)}) if as_json else f"Written to {html}")
        return
    if as_json:
        typer.echo(json.dumps(shown))
        return
    console = Terminal()
    console.print(_overview(shown["datasets"]))
    for dataset in shown["datasets"]:
        if dataset["entries"]:
            console.print(_runs(dataset))


def _write_page(shown: dict[str, Any], path: Path) -> None:
    # Late: most commands draw nothing.
    from dpray.report.ledger_page import render_ledger

    try:
        path.write_text(render_ledger(shown, now()), encoding="utf-8")
    except OSError as error:
        raise InputError(f"--html {path}: {error.strerror}") from error


@app.command()
def verify(
    ledger: Url,
    contains: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN_DIR",
            help="A run's folder; the ledger has to hold the entry that its report names, which a "
            "ledger that was put back to an earlier state does not. May be given several times.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Recompute every hash, cost and total. Exit code 2 if something does not fit."""
    opened, runs = Ledger.open(ledger), contains or []
    found = {str(run): opened.holds(*_last_entry(run)) for run in runs}
    problems = opened.verify() + [
        f"{run}: the ledger does not hold the entry that the run's report names as its last one: "
        "it is another ledger, or was put back to an earlier state"
        for run, held in found.items()
        if not held
    ]
    if as_json:
        typer.echo(json.dumps({"problems": problems} | ({"contains": found} if runs else {})))
    else:
        typer.echo(
            printable("\n".join(problems)) or "the ledger is as it was written; every total fits"
        )
    if problems:
        raise InputError(f"problems found in the ledger: {len(problems)}")


@app.command()
def export(
    ledger: Url,
    out: Annotated[
        Path | None, typer.Option(help="A file for the entries; without it they are printed.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write every entry, one JSON object per line, in the order of its chain."""
    if out is not None:
        refuse_cloud(out, "--out")
    rows = (json.dumps(row) for row in Ledger.open(ledger).export())
    if out is None:
        for row in rows:
            typer.echo(row)
        return
    number = 0
    try:
        with out.open("w", encoding="utf-8") as file:
            for number, row in enumerate(rows, start=1):  # noqa: B007
                file.write(row + "\n")
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror}") from error
    typer.echo(json.dumps({"entries": number, "out": str(out)}) if as_json else f"{number} entries")


def _last_entry(run_dir: Path) -> tuple[str, int, str]:
    """Return data set, sequence number and hash of a run's last ledger entry, from its report."""
    place = read_json(run_dir / "privacy_report.json").get("ledger") or {}
    match place:
        case {"dataset": str(dataset), "sequence": int(sequence), "head": str(head)} if (
            dataset.isprintable() and 0 <= sequence < 2**63  # what a database can be asked for
        ):
            return dataset, sequence, head
    raise InputError(
        f"{run_dir}: its report does not name the run's last entry in a ledger: nothing was "
        "charged for it, or an older version of dpray made it"
    )


def _overview(datasets: list[dict[str, Any]]) -> Table:
    table = Table(title="Budgets (epsilon / delta)")
    table.add_column("data set", overflow="fold")
    for heading in ("budget", "spent", "left"):
        table.add_column(heading, justify="right")
    table.add_column("spent", min_width=16)
    for dataset in datasets:
        rule = dataset["composition"] + (f" {dataset['order']:g}" if dataset["order"] else "")
        name = f"{dataset['dataset']}\nper {dataset['privacy_unit']}, {rule}"
        if dataset["parent"] is not None:
            name += f"\nchild of {dataset['parent']}"
        table.add_row(name, *_balance(dataset))
        for share in dataset["tenants"]:
            table.add_row(f"  tenant {share['tenant']}", *_balance(share))
    return table


def _balance(account: dict[str, Any]) -> tuple[str, str, str, ProgressBar]:
    budget, spent, left = (account[name] for name in ("budget", "spent", "left"))
    bar = ProgressBar(total=budget["epsilon"], completed=spent["epsilon"], width=16)
    return _pair(budget), _pair(spent), _pair(left), bar


def _runs(dataset: dict[str, Any]) -> Table:
    table = Table(title=f"Runs on '{dataset['dataset']}'")
    table.add_column("run", overflow="fold")
    for heading in ("reserved (UTC)", "asked", "batches", "state"):
        table.add_column(heading)
    for run in dataset["entries"]:
        batches = run["batches"]
        if batches["started"]:
            number = f"{batches['published']} of {batches['started']} published"
        else:
            number = "none started"
        if batches["failed"]:
            number += f", {batches['failed']} failed"
        state = "finished" if batches["committed"] else "open"
        reserved = run["at"][:16].replace("T", " ")
        of = [run["key"]]
        of += [f"for {run['tenant']}"] if run["tenant"] else []
        of += [f"on {run['drawn_by']}"] if run["drawn_by"] else []
        table.add_row("\n".join(of), reserved, _pair(run), number, state)
    return table


def _pair(budget: dict[str, float]) -> str:
    return f"{budget['epsilon']:.6g} / {budget['delta']:.3g}"
