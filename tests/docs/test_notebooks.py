"""The notebooks run from top to bottom, in an empty folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def code_cells(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    try:
        for cell in code_cells(notebook):
            shorter = cell.replace("(0.5, 1, 2, 4)", "(0.5, 4)")  # seven seconds each
            exec(compile(shorter, notebook.name, "exec"), names)
    finally:
        ray.shutdown()  # a run may have started it in this process
    assert (tmp_path / "notes.yaml").is_file()
    assert (tmp_path / "out" / "notes" / "synthetic.jsonl").is_file() or "compared" in names


def test_there_are_three_with_what_they_print() -> None:
    assert len(NOTEBOOKS) == 3
    for notebook in NOTEBOOKS:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        assert any(cell.get("outputs") for cell in cells)
