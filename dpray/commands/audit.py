"""`dpray audit` compares claimed epsilons with lower bounds from draws of the mechanisms."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

import dpray
from dpray.commands.plan import AsJson, ConfigFile, Overrides
from dpray.io.files import check_writable, write_durably
from dpray.report.pictures import canaries_svg, standalone
from dpray.runs.folder import refuse_released
from dpray.terminal import Terminal, progress_bar, titled_table
from dpray.types import InputError, Json

Members = Annotated[
    str | None, typer.Option(help="Records that the finished run at output.path was made of.")
]
NonMembers = Annotated[
    str | None, typer.Option(help="Similar records that had no part in that run.")
]
Canaries = Annotated[
    bool,
    typer.Option(
        "--canaries",
        help="Also run the method on a copy of data.path with made-up secrets in it, and look for "
        "them in the release. Opens the data; charges no budget.",
    ),
]


def audit(
    config: ConfigFile,
    overrides: Overrides = None,
    as_json: AsJson = False,
    confidence: Annotated[
        float, typer.Option(help="The probability that all bounds hold together; at least 0.5.")
    ] = 0.95,
    trials: Annotated[int, typer.Option(help="Draws of each mechanism in each world.")] = 10_000,
    members: Members = None,
    non_members: NonMembers = None,
    canaries: Canaries = False,
    candidates: Annotated[
        int, typer.Option(help="Look-alikes that a canary's secret is ranked among.")
    ] = 10_000,
    out: Annotated[
        Path | None, typer.Option(help="Also write the findings to this file, as JSON.")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            help="Draw the canaries' perplexities among those of their look-alikes, as an SVG "
            "file. For DP-SGD, whose model is asked."
        ),
    ] = None,
) -> None:
    """Attack the noise of a plan, and so bound epsilon from below. Opens no data for that.

    Exit code 1 if a bound is above its claim.
    """
    loaded = dpray.load(config, *overrides or [])
    if picture is not None and not (canaries and loaded.method.name == "dp_sgd"):
        raise InputError("--picture: needs --canaries and the model that dp_sgd releases")
    if picture is not None and picture == out:
        raise InputError("--picture: is the file of --out; give another one")
    for file, key in ((out, "--out"), (picture, "--picture")):
        if file is not None:
            check_writable(file, key)
            if members is not None or canaries:
                refuse_released(file.parent, key)
    with progress_bar() as on_progress:
        result = dpray.audit(
            loaded,
            on_progress,
            trials=trials,
            confidence=confidence,
            candidates=candidates,
            members=members,
            non_members=non_members,
            canaries=canaries,
        )
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_durably(out, json.dumps(result, indent=2) + "\n", private=True)
    if picture is not None:
        drawn = standalone(canaries_svg(result["canaries"]["secrets"]))
        picture.parent.mkdir(parents=True, exist_ok=True)
        write_durably(picture, drawn, private=True)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        show_audit(result, Terminal())
    if not result["holds"]:
        raise typer.Exit(1)


def show_audit(result: Json, console: Terminal) -> None:
    if not result["not_private"]:
        console.print(_bounds_table(result))
        broken = [found for found in result["mechanisms"] if not found["holds"]]
        for found in broken:
            message = (
                f"EXCEEDED: {found['name']}: eps is at least "
                f"{found['lower_bound']:.4f}, but the claim is {found['claimed']:.4f}"
            )
            console.say(message, style="bold red")
        for found in result["mechanisms"]:
            if found["most"] < found["claimed"]:
                message = (
                    f"{found['name']}: this number of trials cannot refute the claim, whatever the "
                    "mechanism does; give more --trials"
                )
                console.note("note", "yellow", message)
        if not broken:
            console.print("No bound is above its claim. That is no proof: a bound can only refute.")
    if (membership := result.get("membership")) is not None:
        console.note("NOT PRIVATE", "bold", f"{membership['private']}.")
        console.print(_membership_table(membership))
    if (canaries := result.get("canaries")) is not None:
        console.note("NOT PRIVATE", "bold", f"{canaries['private']}; {canaries['ledger']}.")
        console.print(_canaries_table(canaries["secrets"]))


def _bounds_table(result: Json) -> Table:
    title = (
        f"Plan: ({result['epsilon']:.4f}, {result['delta']:g})-DP (no data was opened)\n"
        f"Epsilon of each mechanism, {result['mechanisms'][0]['trials']:,} trials, "
        f"{result['confidence']:.0%} confidence"
    )
    rows = [
        (
            found["name"],
            f"{found['claimed']:.4f}",
            f"{found['lower_bound']:.4f}",
            f"{found['most']:.2f}",
            "ok" if found["holds"] else Text("EXCEEDED", "bold red"),
        )
        for found in result["mechanisms"]
    ]
    return titled_table(title, ("mechanism", "claimed", "at least", "provable", ""), rows)


def _membership_table(membership: Json) -> Table:
    interval = f"{membership['confidence']:.0%} interval"
    return titled_table(
        f"{membership['members']} members among {membership['non_members']} others, by "
        f"{membership['synthetic']} synthetic texts",
        ("score", "AUC (0.5 is chance)", interval, "found at 1 % false"),
        [
            (
                name.replace("_", " "),
                f"{found['auc']:.3f}",
                "{:.3f} to {:.3f}".format(*found["auc_interval"]),
                f"{found['true_positive_rate']:.1%}",
            )
            for name, found in membership["scores"].items()
        ],
    )


def _canaries_table(secrets: list[Json]) -> Table:
    """Group the canaries by repetitions, as Yue et al. (2023) do in Table 4."""
    by_repetitions: defaultdict[int, list[Json]] = defaultdict(list)
    for secret in secrets:
        by_repetitions[secret["repetitions"]].append(secret)
    columns = ["repetitions", "secrets", "leaked", "texts that hold one"]
    ranked = "rank" in secrets[0]
    if ranked:
        columns += [f"mean rank of {secrets[0]['candidates']:,}", "mean exposure, bits"]
    rows = []
    for repetitions, group in by_repetitions.items():
        hits = [secret["leaks"] for secret in group]
        rows.append(
            [f"{repetitions}", f"{len(group)}", f"{sum(map(bool, hits))}", f"{sum(hits):,}"]
        )
        for key in ("rank", "exposure") if ranked else ():
            rows[-1].append(f"{fmean(secret[key] for secret in group):,.1f}")
    return titled_table("Canaries", columns, rows)
