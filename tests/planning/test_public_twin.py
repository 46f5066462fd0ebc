"""Public records that stand in for private ones, and copies of private ones, keep their labels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpray.methods.config import parse_config
from dpray.planning.rehearse import as_released, draw, on_twin, public_records, write_twin
from dpray.types import InputError
from dpray.workers.rows import data_pieces, read_records

Settings = Callable[..., dict[str, Any]]
KEYS = {"data__labels": [0, True], "data__encoding": "cp1252"}


def test_a_twin_is_read_as_the_data_would_be(settings: Settings, tmp_path: Path) -> None:
    """CSV has no types. The twin is JSON in UTF-8 with the types of data.labels."""
    public = tmp_path / "public.csv"
    public.write_text("text;label;who\nKäse;0;x\n;0;y\nBrot;true;y\n")
    config = parse_config(settings(**KEYS, data__unit="who", data__max_records_per_unit=1))
    found = list(public_records(config, str(public)))
    assert [text for text, _ in found] == ["Käse", "Brot"]
    rows = [row for _, row in found]
    assert as_released(config, rows) == [
        {"text": "Käse", "label": 0},
        {"text": "Brot", "label": True},
    ]
    twin = write_twin(draw(rows, 3, "who"), tmp_path / "twin")
    tree = on_twin(config, config.model_dump(mode="json")["method"], twin, tmp_path / "run")
    data = parse_config(tree).data
    records = [record for piece in data_pieces(data) for _, record in read_records(piece, data)]
    assert sorted({record.text for record in records}) == ["Brot", "Käse"]
    assert {record.label for record in records} == {"0", "true"}


def test_nested_and_several_columns(settings: Settings, tmp_path: Path) -> None:
    public = tmp_path / "public.jsonl"
    public.write_text('{"note": {"title": "x", "body": "y"}, "label": "a"}\n')
    for text, made in (("note.body", "y"), (["note.title", "note.body"], None)):
        config = parse_config(settings(data__text=text))
        [(found, row)] = public_records(config, str(public))
        [released] = as_released(config, [row])
        assert released["text"] == found == (made or '{"note.title": "x", "note.body": "y"}')


def test_a_label_that_is_not_configured(settings: Settings, tmp_path: Path) -> None:
    public = tmp_path / "public.jsonl"
    public.write_text(json.dumps({"text": "x", "label": "0"}) + "\n")
    config = parse_config(settings(**KEYS))
    with pytest.raises(InputError, match=r"^--public: public.jsonl, row 1: the label is a text"):
        list(public_records(config, str(public)))
