"""The notebooks run from top to bottom, in an empty folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray

from tests.conftest import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


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
            shorter = cell.replace("(0.5, 1, 2, 4)", "(1,)").replace("records: 12", "records: 2")
            exec(compile(shorter, notebook.name, "exec"), names)
    finally:
        ray.shutdown()  # a run may have started it in this process
    folder = tmp_path / "out" / notebook.stem
    assert [*tmp_path.rglob("notes.yaml")] == [folder / "notes.yaml"]
    assert {*tmp_path.iterdir()} == {folder.parent} and {*folder.parent.iterdir()} == {folder}
    assert (folder / "run" / "synthetic.jsonl").is_file() or "compared" in names


def test_there_are_three_with_what_they_print_in_the_readme() -> None:
    assert len(NOTEBOOKS) == 3
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for notebook in NOTEBOOKS:
        assert f"(docs/notebooks/{notebook.name})" in readme
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        assert any(cell.get("outputs") for cell in cells)
