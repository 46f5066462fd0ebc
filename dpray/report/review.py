"""A sample of a release for people who read and judge texts, in the form of their tool."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from heapq import nsmallest
from pathlib import Path

from dpray.io.columns import label_name
from dpray.io.files import write_durably
from dpray.io.records import read_rows
from dpray.runs.folder import RECORDS
from dpray.runs.privacy_report import REPORT, read_report
from dpray.types import InputError, Json


def label_studio(number: int, row: Json, about: dict[str, str]) -> Json:
    """Return a task of Label Studio: its labelling configuration shows `$text` and `$label`."""
    return {"id": number, "data": {"text": row["text"], "row": number} | about}


def argilla(number: int, row: Json, about: dict[str, str]) -> Json:
    """Return a record as `Record.from_dict` of Argilla takes it, with one field, `text`."""
    return {
        "id": str(number),
        "fields": {"text": row["text"]},
        "metadata": {"row": number} | about,
        "suggestions": {},
        "responses": {},
        "vectors": {},
    }


TOOLS: dict[str, Callable[[int, Json, dict[str, str]], Json]] = {
    "label-studio": label_studio,
    "argilla": argilla,
}


def _label(row: Json) -> dict[str, str]:
    return {} if row.get("label") is None else {"label": label_name(row["label"])}


def write_review(run_dir: Path, tool: str, records: int) -> Path:
    """Write a sample of a finished run's synthetic texts for a tool, and return its path. Equal
    releases have equal samples, and a larger sample holds a smaller one.

    Raises InputError for another tool, a run that has not finished, and one without noise.
    """
    if tool not in TOOLS:
        raise InputError(f"--review: not {tool}; one of {', '.join(TOOLS)}")
    if read_report(run_dir / REPORT).not_private:
        raise InputError(f"{run_dir}: this run is not private, and nothing of it may be released")
    rows = enumerate((row for _, row in read_rows(str(run_dir / RECORDS))), start=1)
    drawn = nsmallest(records, rows, key=lambda each: sha256(f"{each}".encode()).digest())
    made = [TOOLS[tool](number, row, _label(row)) for number, row in drawn]
    path = run_dir / f"review_{tool.replace('-', '_')}.json"
    write_durably(path, json.dumps(made, indent=2, ensure_ascii=False) + "\n")
    return path
