"""`python experiments/make_demo.py --out DIR` makes the packaged demo from nothing.

The data files are the same byte for byte everywhere; the model's weights are on the same hardware
with the same number of threads. It takes about ten minutes on two cores.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from clinic_notes import Note, private_notes, public_notes
from demo_model import TrainingPlan, train

from dpray.terminal import progress_bar

PRIVATE_RECORDS, PUBLIC_RECORDS, TEST_RECORDS = 3600, 600, 1000
_DATA_SEED = 20


def make_data(out: Path) -> None:
    """Write private.jsonl, test.jsonl (one clinic, no text in both) and public.jsonl to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    clinic = private_notes(PRIVATE_RECORDS + TEST_RECORDS, random.Random(_DATA_SEED))
    _write(clinic[:PRIVATE_RECORDS], out / "private.jsonl")
    _write(clinic[PRIVATE_RECORDS:], out / "test.jsonl")
    _write(public_notes(PUBLIC_RECORDS, random.Random(_DATA_SEED + 1)), out / "public.jsonl")


def _write(notes: Sequence[Note], path: Path) -> None:
    lines = (json.dumps(note._asdict()) + "\n" for note in notes)
    path.write_bytes("".join(lines).encode())


def main(out: Annotated[Path, typer.Option(help="Folder for data/ and model/.")]) -> None:
    """Make the demo's data, tokenizer and model."""
    make_data(out / "data")
    with progress_bar(transient=False) as on_progress:
        train(TrainingPlan(), out / "model", on_progress)


if __name__ == "__main__":
    typer.run(main)
