"""A model's folder may bring code of its own, which nobody runs and nobody is asked about."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dpray.engines.base import EngineError
from dpray.engines.embedder import SentenceTransformerEmbedder
from dpray.engines.passes import load_model
from dpray.engines.text import TextCodec
from dpray.types import InputError

PACKAGE = Path(__file__).parents[2] / "dpray"
WITHOUT_CODE = {"GenerationConfig", "PeftModel"}
"""These load a file of numbers; they know no `trust_remote_code`."""

LOADERS = {
    "tokenizer": lambda folder: TextCodec(folder, None),
    "model": lambda folder: load_model(folder, "float32", torch.device("cpu")),
    "embedder": SentenceTransformerEmbedder,
}


@pytest.fixture
def folder(tmp_path: Path, model_folder: str) -> Path:
    """The packaged model, whose classes a file `own.py` defines. It leaves `ran` if it is run."""
    made = tmp_path / "model"
    shutil.copytree(model_folder, made)
    (made / "own.py").write_text(f"open({str(made / 'ran')!r}, 'w')\n")
    auto = {
        "AutoConfig": "own.Config",
        "AutoModelForCausalLM": "own.Model",
        "AutoTokenizer": [None, "own.Tokenizer"],
    }
    for name, more in {
        "config.json": {"model_type": "own", "architectures": ["Model"]},
        "tokenizer_config.json": {"tokenizer_class": "Tokenizer"},
    }.items():
        values = json.loads((made / name).read_text())
        (made / name).write_text(json.dumps(values | more | {"auto_map": auto}))
    module = {"idx": 0, "name": "0", "path": "", "type": "own.Module"}
    (made / "modules.json").write_text(json.dumps([module]))
    return made


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_a_models_own_code_is_not_run(
    folder: Path, load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda _: "y")  # whoever is asked says yes
    with pytest.raises((EngineError, InputError), match=r"ValueError"):
        load(str(folder))
    assert not (folder / "ran").exists()


def loads() -> Iterator[tuple[str, ast.Call]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            owner, _, name = ast.unparse(node.func).rpartition(".")
            if name == "SentenceTransformer" or (
                name == "from_pretrained" and owner.rpartition(".")[2] not in WITHOUT_CODE
            ):
                yield f"{path.name}:{node.lineno}", node


def test_every_load_says_that_it_runs_no_code() -> None:
    """By default transformers asks at the terminal. A `**` argument is looked at by hand."""
    found = dict(loads())
    silent = [
        place
        for place, call in found.items()
        if not {"trust_remote_code", None} & {keyword.arg for keyword in call.keywords}
    ]
    assert len(found) > 9 and silent == []
