"""A folder with adapters is a model for everything that takes one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dpray.config.config import EngineConfig
from dpray.engines.base import PlainPrompt, Sampling
from dpray.engines.model_path import absolute_model, is_at_hand, resolve_model
from dpray.engines.transformers import TransformersEngine
from dpray.types import InputError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dpray"


def with_adapters(base: str, folder: Path, seed: int = 0) -> Path:
    """Write random adapters on every linear layer of a model; a name of a hub is named only."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    for name, weight in adapted.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(weight, std=0.3)
    adapted.save_pretrained(folder)
    return folder


def renamed(folder: Path, base: Any) -> Path:
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = base
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([[1, 50, 60, 70, 80]])).logits
    return found


def test_the_merged_model_is_the_model_with_its_adapters(
    model_folder: str, tmp_path: Path, cache: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = with_adapters(model_folder, tmp_path / "adapters")
    merged = resolve_model(str(folder))
    plain: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype="float32")
    without = logits(plain)
    expected = logits(PeftModel.from_pretrained(plain, folder))
    found = logits(AutoModelForCausalLM.from_pretrained(merged))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert (found - without).abs().max() > 0.1
    assert Path(merged).parent == cache
    engine = TransformersEngine(EngineConfig(model=str(folder)))
    sampling = Sampling(4, temperature=1.0)
    assert len(engine.generate([PlainPrompt("the patient")], [sampling])) == 1
    engine.close()


def test_what_was_merged_is_found_again_and_what_changed_is_merged_anew(
    model_folder: str, tmp_path: Path, cache: Path
) -> None:
    base = shutil.copytree(model_folder, tmp_path / "base")
    folder = with_adapters(str(base), tmp_path / "adapters")
    first = resolve_model(str(folder))
    assert resolve_model(str(folder)) == first
    with_adapters(str(base), folder, seed=1)
    second = resolve_model(str(folder))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"rope_theta": 20_000.0}))
    third = resolve_model(str(folder))
    assert len({first, second, third}) == 3
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 3


def test_adapters_on_adapters_are_merged_from_below(model_folder: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    public = with_adapters(model_folder, tmp_path / "public")
    private = with_adapters(resolve_model(str(public)), tmp_path / "private", seed=1)
    expected = logits(AutoModelForCausalLM.from_pretrained(resolve_model(str(private))))
    found = resolve_model(str(renamed(private, str(public))))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(found)), expected)


@pytest.mark.parametrize("base", [None, "", 7])
def test_adapters_of_no_model_are_refused(model_folder: str, tmp_path: Path, base: Any) -> None:
    folder = renamed(with_adapters(model_folder, tmp_path / "adapters"), base)
    with pytest.raises(InputError, match=r"engine\.model: .*adapter_config.json names no model"):
        resolve_model(str(folder))


def test_adapters_that_cannot_be_merged_are_refused(
    model_folder: str, tmp_path: Path, cache: Path
) -> None:
    folder = with_adapters(model_folder, tmp_path / "adapters")
    (folder / "adapter_config.json").write_text("not json")
    with pytest.raises(InputError, match="names no model"):
        resolve_model(str(folder))
    with_adapters(model_folder, folder)
    with pytest.raises(InputError, match=r"lm: no such folder: .*gone \(the model of the adapters"):
        resolve_model(str(renamed(folder, str(tmp_path / "gone"))), "lm")
    with pytest.raises(InputError, match=r"engine\.model: adapters on more than 8 adapters"):
        resolve_model(str(renamed(folder, str(folder))))
    renamed(folder, model_folder)
    (folder / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(InputError, match=r"engine\.model: the adapters .* cannot be merged"):
        resolve_model(str(folder))
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(InputError, match=r"adapters without adapter_model\.safetensors"):
        resolve_model(str(folder))
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_a_plan_does_not_load_the_model_of_adapters_from_a_hub(
    model_folder: str, tmp_path: Path
) -> None:
    folder = with_adapters(model_folder, tmp_path / "adapters")
    assert is_at_hand(str(folder))
    assert not is_at_hand(str(renamed(folder, "owner/name")))
    assert is_at_hand(str(renamed(folder, "smollm2")))


def test_the_model_has_a_path_for_another_working_directory(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model_folder, "base")
    folder = with_adapters("base", Path("adapters"))
    assert absolute_model("base") == str(tmp_path / "base")
    elsewhere = absolute_model("adapters")
    renamed(folder, str(tmp_path / "base"))
    assert absolute_model("adapters") == str(tmp_path / "adapters")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert resolve_model(elsewhere) == elsewhere
    assert absolute_model("owner/name") == "owner/name" and absolute_model("") == ""


def test_the_adapters_of_an_embedder_are_left_to_its_package(
    model_folder: str, tmp_path: Path
) -> None:
    folder = with_adapters(model_folder, tmp_path / "adapters")
    (folder / "modules.json").write_text("[]")
    assert resolve_model(str(folder), "embedder.model") == str(folder)
