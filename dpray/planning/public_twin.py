"""A public twin: public records of the same shape that stand in for the private ones. A run on a
twin has a ledger of its own, opens no private data and charges no budget."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from dpray.config.config import Config
from dpray.io.columns import column_of, is_empty, match_label, text_of
from dpray.io.formats import Where
from dpray.io.public_files import public_files
from dpray.io.records import read_rows
from dpray.planning.compare import plain, with_method
from dpray.types import InputError
from dpray.workers.rows import unit_of

FILE = "public_twin.jsonl"


def public_records(config: Config, public: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the text and the row of each record of `--public`, without blank texts. Labels have
    their type in `data.labels`; nested columns are also found by their dotted names.

    Raises InputError for a row without the configuration's columns and labels, and for `data.path`
    itself."""
    for file in public_files(public, "--public", config.data.path):
        for where, row in read_rows(file):
            try:
                text = text_of(row, config.data.text, where)
                if not is_empty(text):
                    yield text, row | _columns(config, row, text, where)
            except InputError as error:
                raise InputError(f"--public: {error}") from None


def _columns(config: Config, row: Mapping[str, Any], text: str, where: Where) -> dict[str, Any]:
    data = config.data
    found: dict[str, Any] = {data.text: text} if isinstance(data.text, str) else {}
    if data.label is not None:
        value = column_of(row, data.label, where)
        found[data.label] = data.released_label(
            match_label(value, data.label_names, data.label, where)
        )
    if data.unit is not None:
        found[data.unit] = unit_of(row, data.unit, where)
    return found


def as_released(config: Config, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of `public_records` in the form of a release: with a `text` and a `label`."""
    data = config.data
    return [
        {
            "text": text_of(row, data.text, Where(FILE, number)),
            "label": None if data.label is None else row[data.label],
        }
        for number, row in enumerate(rows, start=1)
    ]


def draw(rows: Sequence[dict[str, Any]], size: int, unit: str | None) -> list[dict[str, Any]]:
    """Draw about `size` records in whole units, the same ones for the same arguments. The order is
    random; if the rows do not suffice, they are drawn again as other units."""
    of_unit: dict[Any, list[dict[str, Any]]] = {}
    for number, row in enumerate(rows):
        of_unit.setdefault(number if unit is None else row[unit], []).append(row)
    units, rng = list(of_unit.items()), np.random.default_rng(size)
    drawn: list[dict[str, Any]] = []
    for turn in count():
        for place in rng.permutation(len(units)):
            if len(drawn) >= size:
                return drawn
            name, its_rows = units[place]
            new = {} if unit is None else {unit: f"{name}-{turn}"}
            drawn += [row | new for row in its_rows]
    raise AssertionError("unreachable: count() has no end")


def write_twin(rows: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """Write the records that stand in for the private ones."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    path.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows), encoding="utf-8")
    return path


def on_twin(config: Config, method: Mapping[str, Any], twin: Path, folder: Path) -> dict[str, Any]:
    """Return the configuration, as a plain tree, of a run of `method` on the twin's records, in
    `folder` and with a ledger of its own."""
    tree = plain(config)
    changed = {
        "data": {"path": str(twin), "encoding": None},
        "privacy": {
            "ledger": f"sqlite:///{folder}/private/ledger.db",
            "dataset": "rehearsal",
        },
        "output": {"path": str(folder)},
    }
    own = {key: tree[key] | new for key, new in changed.items()}
    return with_method(tree | own, method)
