"""The packaged texts of `dpray demo` fit their configurations. `make demo` runs it."""

from __future__ import annotations

from collections import Counter
from importlib import resources
from pathlib import Path

import pytest

from dpray.commands.demo import DEMOS, demo_config
from dpray.io.records import read_rows

FOLDER = Path(str(resources.files("dpray.demo")))


@pytest.mark.parametrize("name", DEMOS)
def test_a_demos_texts_are_those_of_its_configuration(name: str, tmp_path: Path) -> None:
    chosen = DEMOS[name]
    config = demo_config(FOLDER, tmp_path, chosen)
    labels = Counter(row["label"] for _, row in read_rows(config.data.path))
    assert set(labels) == set(config.data.labels)
    assert labels.total() == config.data.public_size
    tested = {row["label"] for _, row in read_rows(str(FOLDER / chosen.texts / "test.jsonl"))}
    assert tested == set(labels)
    assert (config.engine.model == name) == (chosen.model is None)


@pytest.mark.parametrize("name", DEMOS)
def test_no_tested_text_is_a_private_one(name: str, tmp_path: Path) -> None:
    texts = FOLDER / DEMOS[name].texts
    private, tested = (
        {row["text"] for _, row in read_rows(str(texts / f"{part}.jsonl"))}
        for part in ("private", "test")
    )
    assert tested and not private & tested
