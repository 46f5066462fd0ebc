"""The pages of a run's folder are written from the files in it."""

from __future__ import annotations

from collections import defaultdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

from dpray.io.columns import text_of
from dpray.io.files import read_json, write_durably
from dpray.io.records import read_rows
from dpray.report.page import render_report
from dpray.types import InputError, valid_unicode

PAGE = "privacy_report.html"
SAMPLES = 20
SAMPLES_PER_LABEL = 5


def write_report(run_dir: Path, public: bool) -> tuple[Path, Path | None]:
    """Write the public page of a run's folder and, unless `public`, a page with the evaluation, if
    there is one, into the folder's `private`. Return the paths of the two, the second or None.

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


def _samples(path: Path) -> list[dict[str, Any]]:
    """Return the first records of each label, in turn, in the order of the labels' names."""
    by_label: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for where, row in read_rows(str(path)):
        text_of(row, "text", where)
        kept = by_label[str(row.get("label"))]
        if len(kept) < SAMPLES_PER_LABEL:
            kept.append(row)
    turns = zip_longest(*(rows for _, rows in sorted(by_label.items())))
    return [row for turn in turns for row in turn if row is not None][:SAMPLES]
