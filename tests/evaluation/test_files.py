"""The files of an evaluation are read as those of a run are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpray.evaluation.files import read_labelled
from dpray.io.formats import AS_RECOGNISED, FileFormat
from dpray.types import InputError


def test_real_records_are_files_as_people_have_them(tmp_path: Path) -> None:
    """The cells of CSV are the labels of a release, by name; a blank text is no record."""
    real, released = tmp_path / "real.csv", tmp_path / "synthetic.jsonl"
    real.write_bytes("text;label\nKäse;0\n ;0\nBrot;true\nWein;\n".encode("cp1252"))
    rows = [{"text": "x", "label": label} for label in (0, True, "")]
    released.write_text("".join(json.dumps(row) + "\n" for row in rows))
    form = FileFormat(encoding="cp1252", keys="--")
    records = read_labelled(str(real), "--real", "text", "label", form)
    assert records == [("Käse", "0"), ("Brot", "true"), ("Wein", "")]
    made = read_labelled(str(released), "--synthetic", "note.body", "kind", AS_RECOGNISED)
    assert made == [("x", "0"), ("x", "true"), ("x", "")]
    with pytest.raises(InputError, match=r"^real.csv, row 1: .* set --encoding=cp1252$"):
        read_labelled(str(real), "--real", "text", "label", FileFormat(keys="--"))


def test_nested_columns(tmp_path: Path) -> None:
    path = tmp_path / "real.json"
    path.write_text(json.dumps([{"note": {"body": "x", "kind": 1.0}}, {"note": {"body": None}}]))
    assert read_labelled(str(path), "--real", "note.body", "note.kind", AS_RECOGNISED) == [
        ("x", "1.0")
    ]
