"""Models whose rows share a scale of their activations: a record would move the rows of others."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dpray.config.sections import EngineConfig
from dpray.engines.base import LockstepGroup, SelectorSpec
from dpray.engines.row_variation import refuse_shared_scales, row_variation, works_by_rows
from dpray.engines.transformers import TransformersEngine
from dpray.methods.dp_sgd.training.model import load_loss
from dpray.methods.dp_sgd.training.settings import TrainingSettings
from dpray.types import InputError
from dpray.workers.engine import build_engine
from tests.engines.tiny_model import make_model

HOT = 300
"""This token alone makes large numbers, inside the layers."""

INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True}


def activations(**changes: Any) -> dict[str, Any]:
    group = {"targets": ["re:.*mlp.down_proj"], "input_activations": INT8 | changes}
    return {"quant_method": "compressed-tensors", "config_groups": {"one": group}}


PER_PASS = activations(strategy="tensor")


@pytest.fixture(scope="module")
def quantised_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("quantised"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = PER_PASS | {
        "format": "dense",
        "quantization_status": "frozen",
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    embeddings[:, 5] = embeddings[HOT] = 0.0
    embeddings[HOT, 5] = 1.0
    for name, weight in weights.items():
        if name.endswith(("up_proj.weight", "gate_proj.weight")):
            weight[:, 5] *= 100.0
        if name.endswith(("down_proj.weight", "o_proj.weight")):
            weight[5] = 0.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_such_a_record_moves_the_rows_of_others_far_more_than_public_prompts_show(
    quantised_folder: Path,
) -> None:
    pytest.importorskip("compressed_tensors", reason="vllm brings it")
    section = EngineConfig(kind="transformers", model=str(quantised_folder), dtype="float32")
    engine = TransformersEngine(section, device="cpu", group=(16, 64))
    assert row_variation(engine, 24, 200) < 0.2
    rng = random.Random(1)
    prompts = [tuple(rng.choices(range(3, HOT), k=20)) for _ in range(9)]

    def first_row(*others: tuple[int, ...]) -> torch.Tensor:
        spec = SelectorSpec("dpray.engines.row_variation:RowProbe", {"token": 77})
        group = LockstepGroup("a", (prompts[0], *others), prompts[0], spec, 1)
        [result] = engine.decode_lockstep([group])
        return torch.tensor(result.state["logits"])

    alone = first_row(*prompts[1:])
    assert (first_row(*prompts[1:], (*prompts[1], HOT)) - alone).abs().max() > 1.0


@pytest.mark.parametrize("kind", ["transformers", "vllm"])
def test_it_is_refused_before_it_is_loaded(quantised_folder: Path, kind: Any) -> None:
    config = EngineConfig(kind=kind, model=str(quantised_folder))
    with pytest.raises(InputError, match=r"^engine\.model: quantization_config.*whole pass"):
        build_engine(config, public_alone=False)
    with pytest.raises(InputError, match="whole pass"):
        load_loss(str(quantised_folder), TrainingSettings(tuning="lora"))


def test_a_model_that_is_not_quantised_passes(model_folder: str) -> None:
    refuse_shared_scales(model_folder)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False},
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        {"quant_method": "fp8", "activation_scheme": "static"},
        activations(strategy="token"),
        activations(strategy="tensor", dynamic=False),
        {"quant_method": "compressed-tensors", "config_groups": {"one": {"weights": INT8}}},
    ],
)
def test_scales_of_weights_rows_and_constants_are_taken(quantization: Any) -> None:
    assert works_by_rows(quantization)


@pytest.mark.parametrize(
    "quantization",
    [
        PER_PASS,
        activations(strategy="channel"),
        activations(),
        PER_PASS | {"config_groups": {"one": ["Linear"]}},
        PER_PASS | {"config_groups": {}},
        activations(strategy="token") | {"kv_cache_scheme": INT8 | {"strategy": "tensor"}},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        {"quant_method": "torchao"},
        {"quant_method": ["gptq"]},
        {"bits": 4},
        "gptq",
    ],
)
def test_all_others_are_refused(quantization: Any) -> None:
    assert not works_by_rows(quantization)
