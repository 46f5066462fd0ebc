"""A resumed run finds the public files that have changed since it began."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpray.runs.released import model_name
from dpray.runs.runner import changed_files


def test_files_are_compared_by_their_digests_if_both_are_known() -> None:
    def digest(character: str) -> str:
        return f"(sha256 {character * 16})"

    def engine(model: str) -> dict[str, Any]:
        return {"engine": {"model": model, "kind": "transformers"}, "embedder": None}

    tuned, base = f"tuned {digest('a')}", f"base {digest('b')}"
    before = engine(f"{tuned} on {base}")
    assert changed_files(before, before) == []
    assert changed_files({}, before) == [] == changed_files({"engine": None}, before)
    for elsewhere in ("tuned on base", f"{tuned} on base"):  # they are on other machines
        assert changed_files(before, engine(elsewhere)) == []
        assert changed_files(engine(elsewhere), before) == []
    for other in (f"tuned {digest('c')} on {base}", f"{tuned} on base {digest('c')}"):
        assert changed_files(before, engine(other)) == ["engine.model"]


def test_the_files_of_chained_methods_are_compared() -> None:
    def chain(words: str, template: str) -> dict[str, Any]:
        methods = [{"vocabulary": f"words (sha256 {words * 16})"}]
        methods.append({"template": f"t.yaml (sha256 {template * 16})"})
        return {"method": {"name": "chain", "methods": methods}}

    before = chain("a", "b")
    assert changed_files(before, before) == []
    assert changed_files(before, chain("c", "b")) == ["methods.0.vocabulary"]
    assert changed_files(before, chain("a", "c")) == ["methods.1.template"]


def test_what_other_programs_write_into_a_models_folder_is_not_the_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    before = model_name(str(model))
    for name in (".cache/huggingface/download/config.json.metadata", "__pycache__/m.pyc", ".lock"):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text("1")
        assert model_name(str(model)) == before
    (model / "onnx").mkdir()
    (model / "onnx" / "model.onnx").write_text("1")
    assert model_name(str(model)) != before
