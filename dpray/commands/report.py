"""`dpray report`: a finished run as one HTML page."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dpray.commands.terminal import one_line
from dpray.io.files import write_durably
from dpray.io.records import read_rows, text_of
from dpray.report.page import render_report
from dpray.types import InputError, valid_unicode

PAGE = "privacy_report.html"
SAMPLES = 20
SAMPLES_PER_LABEL = 5


def report(
    run_dir: Annotated[Path, typer.Argument(help="Output folder of a run.")],
    public: Annotated[
        bool, typer.Option(help="Leave out what was computed from private data.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON, for programs.")] = False,
) -> None:
    """Write RUN_DIR/privacy_report.html, one page that opens anywhere.

    Where the run was evaluated, RUN_DIR/private gets a page with the evaluation too.
    """
    path, private_path = write_report(run_dir, public)
    if as_json:
        private_place = None if private_path is None else str(private_path)
        typer.echo(json.dumps({"path": str(path), "private_path": private_place}))
        return
    typer.echo(one_line(f"Written to {path}"))
    if private_path is not None:
        typer.echo(
            one_line(f"Written to {private_path}: with the evaluation, PRIVATE, not for release")
        )


def write_report(run_dir: Path, public: bool) -> tuple[Path, Path | None]:
    """Write the public page of a run folder; and, where an evaluation is there and `public` is not
    asked for, a page with it in the folder's `private`. Returns where the two are, the second or
    None.

    Raises InputError where the folder is not that of a finished run.
    """
    if not run_dir.is_dir():
        raise InputError(f"{run_dir}: no such folder")
    privacy_report = read_json(run_dir / "privacy_report.json")
    samples = _samples(run_dir / "synthetic.jsonl")
    run = read_json(run_dir / "run.json")

    path = run_dir / PAGE
    page = render_report(privacy_report, samples, None, run, public=True)
    path.write_text(valid_unicode(page), encoding="utf-8")

    evaluation_path = run_dir / "private" / "evaluation.json"
    if public or not evaluation_path.exists():
        return path, None
    evaluation = read_json(evaluation_path)
    page = render_report(privacy_report, samples, evaluation, run, public=False)
    private_path = evaluation_path.with_name(PAGE)
    write_durably(private_path, valid_unicode(page), private=True)
    return path, private_path


def read_json(path: Path) -> dict[str, Any]:
    """Read a file of a run's folder. Raises InputError where it is missing or no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise InputError(f"{path.parent}: cannot read {path.name}; is it a run's folder?") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path}: not JSON") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: not a JSON object")
    return value


def _samples(path: Path) -> list[dict[str, Any]]:
    """The first records of each label, in turn, in the order of the labels' names."""
    by_label: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for where, row in read_rows(str(path)):
        text_of(row, "text", where)
        kept = by_label[str(row.get("label"))]
        if len(kept) < SAMPLES_PER_LABEL:
            kept.append(row)
    in_turn = [
        rows[turn]
        for turn in range(SAMPLES_PER_LABEL)
        for _, rows in sorted(by_label.items())
        if turn < len(rows)
    ]
    return in_turn[:SAMPLES]
