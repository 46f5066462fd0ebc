"""`dpray run` runs the method of a configuration, from its charge to its release."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.text import Text

import dpray
from dpray.accounting.composition import BasicComposition
from dpray.commands.plan import AsJson, ConfigFile, Overrides
from dpray.config.config import Config
from dpray.extras import Late
from dpray.io.columns import cut_advice, cut_share
from dpray.io.records import read_rows
from dpray.ledger.account import Account
from dpray.ledger.ledger import Ledger
from dpray.methods.registry import is_finished
from dpray.runs.folder import TABLES
from dpray.runs.privacy_report import LedgerEntry, PrivacyReport, parse_report
from dpray.terminal import Terminal, add_or_remove, progress_bar
from dpray.types import DprayError, InputError
from dpray.workers.needs import most_actors

if TYPE_CHECKING:
    from dpray.runs import failures
    from dpray.workers import cluster
else:  # `--help` does not wait for Ray.
    failures, cluster = Late("dpray.runs.failures"), Late("dpray.workers.cluster")

NO_TEXT = (
    "no text was released: the warnings of `dpray plan CONFIG` name the key to turn, and `dpray "
    "preview CONFIG` shows what the model writes (docs/bad_texts.md)"
)

TEXTS_LOOKED_AT, MANY = 1000, 0.2
"""After a run, so many texts are looked at; a share of them that is larger is worth a word."""


def run(config: ConfigFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Make synthetic records. The same command resumes a run that stopped."""
    with failures.explain_charge(None):
        loaded = dpray.load(config, *overrides or [])
    before = has_finished(loaded)
    report = run_with_progress(loaded, as_json)
    if as_json:
        typer.echo(json.dumps(report | {"output": loaded.output.path}))
    else:
        console = Terminal()
        show_run(
            parse_report(report),
            Path(loaded.output.path),
            console,
            present_account(loaded),
            finished_before=before,
        )
        if (bucket := loaded.output.copy_to) is not None:
            console.plain(f"Copied to {bucket}")


def run_with_progress(config: Config, as_json: bool = False) -> dict[str, object]:
    """Run the configuration with a progress bar of public quantities, or their lines in a log."""

    def actors() -> tuple[int, int] | None:
        alive = cluster.actors_alive() if config.runtime.uses_ray else None
        return None if alive is None else (alive, most_actors(config))

    shown = {"transient": False, "as_json": as_json}
    with progress_bar("starting", **shown, actors=actors) as on_progress:
        return dpray.run(config, on_progress).report


def has_finished(config: Config) -> bool:
    """Return whether the folder of the configuration holds a finished run."""
    with suppress(InputError):  # none is there, or one that the run itself complains about
        return is_finished(config)
    return False


def present_account(config: Config) -> Account | None:
    """Return the account of the data set as it is now, None without a ledger that can be read."""
    if config.not_private:
        return None
    with suppress(DprayError), closing(Ledger.open(config.privacy.ledger)) as ledger:
        return ledger.account(config.privacy.dataset)
    return None


def show_run(
    report: PrivacyReport,
    folder: Path,
    console: Terminal,
    account: Account | None = None,
    *,
    finished_before: bool = False,
) -> None:
    """Print the records, cost and files of a run, and what is left on the `account`."""
    records = Text(f"{report.records} synthetic records", "bold")
    console.say(records, _how(report), sep="")
    if finished_before:
        console.say("Finished before: nothing was charged or made")
    ledger = report.ledger
    if ledger is None:
        console.note("NOT PRIVATE", "bold", "no noise was added; nothing of it may be released")
    else:
        # A report tells what was left when its run ended.
        stale = account is None and finished_before
        left = "" if stale else f"; left on '{ledger.dataset}': {_left(ledger, account)}"
        console.say(
            f"Spent: epsilon {report.epsilon:.4f}, delta {report.delta:g} "
            f"({add_or_remove(report.privacy_unit)}){left}"
        )
        what = "ledger" if ledger.made_by_this_run else ""
        if ledger.budget_by_this_run:
            what = f"{what or 'data set'} with a budget of epsilon {ledger.budget.epsilon:g}"
        if what and not finished_before:
            words = f"A new {what} was made; releases of this data elsewhere are not counted in it"
            console.say(words)
    files = ["synthetic.jsonl", "privacy_report.html"]
    if table := report.table:
        left_out = f"; {table.left_out} texts are no rows of it" if table.left_out else ""
        console.print(f"The table has {table.rows} rows{left_out}")
        files[1:1] = TABLES
    for name in files:
        console.plain(f"  {folder / name}")
    if report.table is None and (found := advice(folder, report.method)) is not None:
        console.note("To try", "yellow", found)


def _left(ledger: LedgerEntry, account: Account | None) -> str:
    """Return the budget that is left now, or without an account what was left by the report."""
    left = ledger.left if account is None else account.left
    words = f"epsilon {left.epsilon:.4g}, delta {left.delta:.3g}"
    is_basic = account is not None and account.composition.name == BasicComposition.name
    if is_basic and left.delta == 0 < ledger.spent.delta:
        words += " (no delta is left, so a further run that needs delta is refused)"
    return words


def advice(folder: Path, method: Mapping[str, object]) -> str | None:
    """Return the one key of the method to turn if the released texts are cut, alike or no words;
    the first rows of the release are looked at, which are public."""
    path = folder / "synthetic.jsonl"
    if not path.exists():
        return None
    rows = [row for _, row in islice(read_rows(str(path)), TEXTS_LOOKED_AT)]
    texts = [str(row["text"]) for row in rows]
    if not texts:
        return NO_TEXT
    if (cut := cut_advice(cut_share(rows), method)) is not None:
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
        words += f" ({batches.repeated} repeated"
        words += f", {batches.without_text} without a text)" if batches.without_text else ")"
    if (tokens := report.tokens) and tokens.total:
        share = tokens.private / tokens.total
        words += f"; {share:.0%} of {tokens.total} tokens were chosen by private texts, under noise"
    if calls := report.calls:
        words += (
            f" from {calls.calls} calls of the language model "
            f"({calls.prompt_tokens} tokens read, {calls.completion_tokens} written)"
        )
    return words
