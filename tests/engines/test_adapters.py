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
from dpray.engines.model_path import absolute_model, folder_or_hub, is_at_hand, resolve_model
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
    from transformers import AutoTokenizer

    base = shutil.copytree(model_folder, tmp_path / "base")
    folder = with_adapters(str(base), tmp_path / "adapters")
    first = resolve_model(str(folder))
    assert resolve_model(str(folder)) == first
    with_adapters(str(base), folder, seed=1)
    second = resolve_model(str(folder))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"rope_theta": 20_000.0}))
    third = resolve_model(str(folder))
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    fourth = resolve_model(str(folder))
    assert len({first, second, third, fourth}) == 4
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 4


def test_adapters_on_adapters_are_merged_from_below(model_folder: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    public = with_adapters(model_folder, tmp_path / "public")
    private = with_adapters(resolve_model(str(public)), tmp_path / "private", seed=1)
    expected = logits(AutoModelForCausalLM.from_pretrained(resolve_model(str(private))))
    found = resolve_model(str(renamed(private, str(public))))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(found)), expected)


def changed(folder: Path, **values: Any) -> Path:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | values))
    return folder


def refused(folder: Path, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_model(str(folder))


def test_adapters_that_cannot_be_merged_are_refused(
    model_folder: str, tmp_path: Path, cache: Path
) -> None:
    folder = with_adapters(model_folder, tmp_path / "adapters")
    for text in ("not json", "[" * 100_000, "7"):
        (folder / "adapter_config.json").write_text(text)
        refused(folder, r"engine\.model: .*adapter_config.json is not (a )?JSON")
    with_adapters(model_folder, folder)
    for base in (None, "", 7, "x" * 5000):
        refused(renamed(folder, base), r"engine\.model: .*adapter_config.json names no model")
    gone = r"engine\.model: no such folder: .*gone \(the model of the adapters"
    refused(renamed(folder, str(tmp_path / "gone")), gone)
    refused(renamed(folder, "~nobody-here/x"), "no such folder: ~nobody-here/x")
    refused(renamed(folder, "x" * 300), "has none of this name")
    refused(renamed(folder, str(folder)), r"engine\.model: more than 8 adapters on each other")
    renamed(folder, model_folder)
    refused(changed(folder, peft_type="PROMPT_TUNING"), "other adapters than LoRA's")
    changed(folder, peft_type="LORA", task_type="SEQ_CLS")
    refused(folder, "other adapters than LoRA's")
    refused(changed(folder, task_type=None, revision="main"), "names a revision")
    changed(folder, revision=None, target_modules="(")
    refused(folder, r"engine\.model: the adapters .* cannot be merged into .* \(\w+\)")
    with_adapters(model_folder, folder)
    (folder / "adapter_model.safetensors").write_bytes(b"no tensors")
    refused(folder, r"cannot be merged into .* \(SafetensorError\)")
    (folder / "adapter_model.safetensors").unlink()
    refused(folder, r"adapters without adapter_model\.safetensors")
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_adapters_with_other_tensors_are_refused(model_folder: str, tmp_path: Path) -> None:
    """PEFT warns of them, and leaves the model as it was."""
    from safetensors.torch import load_file, save_file

    folder = with_adapters(model_folder, tmp_path / "adapters")
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name.replace("model.layers", "layers"): t for name, t in tensors.items()}, file)
    refused(folder, "do not fit")
    save_file(dict(list(tensors.items())[1:]), file)
    refused(folder, "do not fit")
    first = next(iter(tensors))
    save_file(tensors | {first: torch.full_like(tensors[first], torch.nan)}, file)
    refused(folder, "do not fit")


def test_a_merge_that_is_another_model_is_refused(model_folder: str, tmp_path: Path) -> None:
    """Adapters on one of two tied weights would change both of them."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config: Any = AutoConfig.from_pretrained(model_folder)
    config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tied")
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path / "tied")
    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "tied")
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["lm_head"]))
    for name, weight in adapted.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(weight, std=0.3)
    adapted.save_pretrained(tmp_path / "adapters", save_embedding_layers=False)
    refused(tmp_path / "adapters", "do not fit")


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
    with_adapters(str(tmp_path / "base"), Path("upper"))
    stacked = absolute_model(str(renamed(Path("upper"), "adapters")))
    beside = absolute_model(str(renamed(with_adapters("base", Path("beside")), "../base")))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert resolve_model(stacked) == stacked
    assert beside == str(tmp_path / "beside") and resolve_model(beside)
    assert resolve_model(elsewhere) == elsewhere
    assert absolute_model("owner/name") == "owner/name" and absolute_model("") == ""


def test_the_adapters_of_an_embedder_or_encoder_are_left_to_its_package(
    model_folder: str, tmp_path: Path
) -> None:
    folder = with_adapters(model_folder, tmp_path / "adapters")
    assert folder_or_hub(str(folder), "embedder.model") == str(folder)


def test_a_model_in_a_bucket_that_may_change_is_refused_below_adapters(tmp_path: Path) -> None:
    """A run pins the files of `engine.model` only; DP-SGD writes the pinned name."""
    folder = tmp_path / "adapters"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    renamed(folder, "s3://models/base")
    with pytest.raises(InputError, match=r"^engine.model: the adapters in .*may change during"):
        resolve_model(str(folder))
    renamed(folder, "s3://models/base#0123456789abcdef")
    fetched = tmp_path / "cache/dpray/bucket-0123456789abcdef"
    fetched.mkdir(parents=True)
    with pytest.raises(InputError, match=r"has adapters without adapter_model.safetensors"):
        resolve_model(str(folder))
