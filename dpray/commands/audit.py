"""`dpray audit`: does the guarantee hold in practice? What is claimed beside what draws prove."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from dpray.commands.plan import AsJson, ConfigFile, Overrides
from dpray.commands.progress import progress_bar
from dpray.commands.terminal import Terminal, titled_table
from dpray.config.config import Config, load_config
from dpray.io.files import check_writable, write_durably
from dpray.types import InputError, Progress

NOTHING_CHARGED = (
    "run with a ledger of its own that is gone: nothing was charged, so nothing of it is released"
)


def audit(
    config: ConfigFile,
    overrides: Overrides = None,
    as_json: AsJson = False,
    confidence: Annotated[
        float, typer.Option(help="That all bounds hold, together; at least 0.5.")
    ] = 0.95,
    trials: Annotated[
        int, typer.Option(help="Draws of each mechanism in each world; canaries of the one run.")
    ] = 10_000,
    members: Annotated[
        str | None,
        typer.Option(help="Records that the finished run at output.path was made of."),
    ] = None,
    non_members: Annotated[
        str | None, typer.Option(help="Records like them that had no part in it.")
    ] = None,
    canaries: Annotated[
        bool,
        typer.Option(
            "--canaries",
            help="Also run the method on a copy of data.path with made-up secrets in it, and look "
            "for them in what comes out. Opens the data; charges no budget.",
        ),
    ] = False,
    candidates: Annotated[
        int, typer.Option(help="Look-alikes that a canary's secret is ranked among.")
    ] = 10_000,
    out: Annotated[
        Path | None, typer.Option(help="Also write the findings to this file, as JSON.")
    ] = None,
) -> None:
    """Bounds on epsilon from below by the mechanisms' real code; no data is opened for them.

    Ends with code 1 where one of them is above the claim.
    """
    loaded = load_config(config, overrides or [])
    if (members is None) != (non_members is None):
        raise InputError("--members and --non-members: give both, or neither")
    # All that can be wrong is looked at before the draws, which may take hours. A plan without a
    # claim has none, so they would not look at the confidence.
    if not 0.5 <= confidence < 1:
        raise InputError(f"confidence: {confidence:g} is not at least 0.5 and below 1")
    if out is not None:
        check_writable(out, "--out")
    attack = None
    if members is not None and non_members is not None:
        attack = _membership(loaded, members, non_members, confidence)
    result = _bounds(loaded, trials, confidence, optional=canaries or attack is not None)
    if attack is not None:
        result["membership"] = attack()
    if canaries:
        result["canaries"] = _canaries(loaded, candidates)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_durably(out, json.dumps(result, indent=2) + "\n", private=True)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _show(result, Terminal())
    if not result["holds"]:
        raise typer.Exit(1)


def _bounds(config: Config, trials: int, confidence: float, optional: bool) -> dict[str, Any]:
    """The mechanisms' part. Of a run that is not private there is none: refused, unless something
    else was asked for."""
    # Imported late: a mistyped key should not have to wait for torch.
    from dpray.audits import audit_plan
    from dpray.registry import make_plan

    plan = make_plan(config)
    result: dict[str, Any] = {"method": config.method.name, "confidence": confidence}
    if plan.not_private and optional:
        claim = {"epsilon": None, "delta": None}
        return result | claim | {"mechanisms": [], "holds": True, "not_private": True}
    with progress_bar(Terminal(stderr=True)) as show:
        findings = audit_plan(plan, trials, confidence, lambda *step: show(Progress(*step)))
    return result | {
        "epsilon": plan.cost.epsilon,
        "delta": plan.cost.delta,
        "mechanisms": [asdict(found) | {"holds": found.holds} for found in findings],
        "holds": all(found.holds for found in findings),
        "not_private": False,
    }


def _membership(
    config: Config, members: str, non_members: str, confidence: float
) -> Callable[[], dict[str, Any]]:
    """The attack, to be called: its texts are read and its model is loaded."""
    from dpray.evaluation.files import load_embedder
    from dpray.evaluation.membership import check_numbers, membership

    released = Path(config.output.path) / "synthetic.jsonl"
    if not released.is_file():
        raise InputError(f"output.path: {config.output.path} holds no finished run")
    inside = _texts(members, "--members", config.data.text)
    outside = _texts(non_members, "--non-members", config.data.text)
    synthetic = _texts(str(released), "output.path", "text")
    check_numbers(inside, outside, synthetic)
    embedder = load_embedder(config.embedder.model, "embedder.model")
    return partial(membership, inside, outside, synthetic, embedder, confidence)


def _texts(path: str, key: str, column: str) -> list[str]:
    from dpray.io.records import list_files, read_rows, text_of

    rows = (each for file in list_files(path, key) for each in read_rows(file))
    return [text_of(row, column, where) for where, row in rows]


def _canaries(config: Config, candidates: int) -> dict[str, Any]:
    from dpray.canaries import try_canaries
    from dpray.evaluation import NOT_FOR_RELEASE

    with progress_bar(Terminal(stderr=True)) as show:
        found = try_canaries(config, candidates, show)
    return {"private": NOT_FOR_RELEASE, "ledger": NOTHING_CHARGED, "secrets": found}


def _show(result: dict[str, Any], console: Terminal) -> None:
    if not result["not_private"]:
        console.print(_bounds_table(result))
        broken = [found for found in result["mechanisms"] if not found["holds"]]
        for found in broken:
            console.print(
                f"EXCEEDED: {found['name']} ({found['how']}): eps is at least "
                f"{found['lower_bound']:.4f}, claimed are {found['claimed']:.4f}",
                style="bold red",
                soft_wrap=True,
            )
        for found in result["mechanisms"]:
            if found["most"] < found["claimed"]:
                console.note(
                    "note",
                    "yellow",
                    f"{found['name']} ({found['how']}): so few trials could not refute the claim, "
                    "whatever the mechanism did; give more --trials",
                )
        if not broken:
            console.print("No bound is above its claim. That is no proof: a bound can only refute.")
    if (membership := result.get("membership")) is not None:
        console.note("NOT PRIVATE", "bold", f"{membership['private']}.")
        console.print(_membership_table(membership))
    if (canaries := result.get("canaries")) is not None:
        console.note("NOT PRIVATE", "bold", f"{canaries['private']}; {canaries['ledger']}.")
        console.print(_canaries_table(canaries["secrets"]))


def _bounds_table(result: dict[str, Any]) -> Table:
    title = (
        f"Plan: ({result['epsilon']:.4f}, {result['delta']:g})-DP (no data was opened)\n"
        f"Epsilon of each mechanism, {result['mechanisms'][0]['trials']:,} trials, "
        f"{result['confidence']:.0%} confidence"
    )
    table = titled_table(title, "mechanism", "claimed", "at least", "provable", "")
    for found in result["mechanisms"]:
        table.add_row(
            f"{found['name']} ({found['how']})",
            f"{found['claimed']:.4f}",
            f"{found['lower_bound']:.4f}",
            f"{found['most']:.2f}",
            "ok" if found["holds"] else Text("EXCEEDED", "bold red"),
        )
    return table


def _membership_table(membership: dict[str, Any]) -> Table:
    table = titled_table(
        f"{membership['members']} members among {membership['non_members']} others, by "
        f"{membership['synthetic']} synthetic texts",
        "score", "AUC (0.5 is chance)", f"{membership['confidence']:.0%} interval",
        "found at 1 % false",
    )  # fmt: skip
    for name, found in membership["scores"].items():
        low, high = found["auc_interval"]
        table.add_row(
            name.replace("_", " "),
            f"{found['auc']:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{found['true_positive_rate']:.1%}",
        )
    return table


def _canaries_table(secrets: list[dict[str, Any]]) -> Table:
    """By repetitions, as Yue et al. (2023), Table 4."""
    by_repetitions: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for secret in secrets:
        by_repetitions[secret["repetitions"]].append(secret)
    ranked = "rank" in secrets[0]
    columns = ["repetitions", "secrets", "leaked", "texts that hold one"]
    if ranked:
        columns += [f"mean rank of {secrets[0]['candidates']:,}", "mean exposure, bits"]
    table = titled_table("Canaries", *columns)
    for repetitions, group in by_repetitions.items():
        hits = [secret["leaks"] for secret in group]
        cells = [f"{sum(hit > 0 for hit in hits)}", f"{sum(hits):,}"]
        if ranked:
            cells += [
                f"{sum(secret[key] for secret in group) / len(group):,.1f}"
                for key in ("rank", "exposure")
            ]
        table.add_row(str(repetitions), str(len(group)), *cells)
    return table
