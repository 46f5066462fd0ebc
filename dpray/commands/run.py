"""`dpray run` runs the method of a configuration, from its charge to its release."""

from __future__ import annotations

import json
import unicodedata
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.text import Text

import dpray
from dpray.commands.plan import AsJson, ConfigFile, Overrides
from dpray.config.config import Config
from dpray.extras import Late
from dpray.io.columns import cut_advice, cut_share
from dpray.io.records import read_rows
from dpray.runs.folder import TABLES
from dpray.runs.privacy_report import PrivacyReport, parse_report
from dpray.terminal import Terminal, add_or_remove, progress_bar
from dpray.workers.needs import most_actors

if TYPE_CHECKING:
    from dpray.runs import failures
    from dpray.workers import cluster
else:  # `--help` does not wait for Ray.
    failures, cluster = Late("dpray.runs.failures"), Late("dpray.workers.cluster")

LOOKED_AT, MANY = 1000, 0.2
"""After a run, so many texts are looked at; a share of them that is larger is worth a word."""


def run(config: ConfigFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Make synthetic records; the same command resumes an unfinished run."""
    with failures.explain_charge(None):
        loaded = dpray.load(config, *overrides or [])
    report = run_with_progress(loaded, as_json)
    if as_json:
        typer.echo(json.dumps(report | {"output": loaded.output.path}))
    else:
        console = Terminal()
        show_run(parse_report(report), Path(loaded.output.path), console)
        if (bucket := loaded.output.copy_to) is not None:
            console.print(f"Copied to {bucket}", highlight=False, soft_wrap=True)


def run_with_progress(config: Config, as_json: bool = False) -> dict[str, object]:
    """Run the configuration with a progress bar of public quantities, or their lines in a log."""

    def actors() -> tuple[int, int] | None:
        alive = cluster.actors_alive() if config.runtime.uses_ray else None
        return None if alive is None else (alive, most_actors(config))

    shown = {"transient": False, "as_json": as_json}
    with progress_bar("starting", **shown, actors=actors) as on_progress:
        return dpray.run(config, on_progress).report


def show_run(report: PrivacyReport, folder: Path, console: Terminal) -> None:
    """Print the records, cost and files of a run."""
    records = Text(f"{report.records} synthetic records", "bold")
    console.print(records, _how(report), sep="", soft_wrap=True)
    ledger = report.ledger
    if ledger is None:
        console.note("NOT PRIVATE", "bold", "no noise was added; nothing of it may be released")
    else:
        console.print(
            f"Spent: epsilon {report.epsilon:.4f}, delta {report.delta:g} "
            f"({add_or_remove(report.privacy_unit)}); left on '{ledger.dataset}': "
            f"epsilon {ledger.left.epsilon:.4g}, delta {ledger.left.delta:.3g}",
            soft_wrap=True,
        )
        what = "ledger" if ledger.made_by_this_run else ""
        if ledger.budget_by_this_run:
            what = f"{what or 'data set'} with a budget of epsilon {ledger.budget.epsilon:g}"
        if what:
            words = f"A new {what} was made; releases of this data elsewhere are not counted in it"
            console.print(words, soft_wrap=True)
    files = ["synthetic.jsonl", "privacy_report.html"]
    if table := report.table:
        left_out = f"; {table.left_out} texts are no rows of it" if table.left_out else ""
        console.print(f"The table has {table.rows} rows{left_out}")
        files[1:1] = TABLES
    for name in files:
        console.print(f"  {folder / name}", highlight=False, soft_wrap=True)
    if report.table is None and (found := advice(folder)) is not None:
        console.note("To try", "yellow", found)


def advice(folder: Path) -> str | None:
    """Return the one key to turn if the released texts are cut, alike or no words; the first rows
    of the release are looked at, which are public."""
    path = folder / "synthetic.jsonl"
    if not path.exists():
        return None
    rows = [row for _, row in islice(read_rows(str(path)), LOOKED_AT)]
    texts = [str(row["text"]) for row in rows]
    if (cut := cut_advice(cut_share(rows))) is not None:
        return cut
    if (alike := 1 - len(set(texts)) / max(1, len(texts))) >= MANY:
        return f"{alike:.0%} of the texts repeat another: raise method.temperature"
    odd = sum(2 * sum(map(_is_of_words, text)) < len(text) for text in texts)
    if odd >= MANY * max(1, len(texts)):
        why = f"{odd / len(texts):.0%} of the texts are mostly signs and digits"
        return f"{why}: lower method.temperature, or take a larger engine.model (docs/bad_texts.md)"
    return None


def _is_of_words(sign: str) -> bool:
    return unicodedata.category(sign)[0] in "LMZ"  # letters, their marks, blanks


def _how(report: PrivacyReport) -> str:
    """Describe how the records were made, by the method's counts."""
    words = ""
    if batches := report.batches:
        words = f" from {batches.published} of {batches.total} batches"
        words += f" ({batches.repeated} repeated)"
    if (tokens := report.tokens) and tokens.total:
        share = tokens.private / tokens.total
        words += f"; {share:.0%} of {tokens.total} tokens drew on private texts, with noise"
    if calls := report.calls:
        words += (
            f" from {calls.calls} calls of the language model "
            f"({calls.prompt_tokens} tokens read, {calls.completion_tokens} written)"
        )
    return words
