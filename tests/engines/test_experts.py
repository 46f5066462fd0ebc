"""Mixtures of experts: which expert computes a token could depend on the rows of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import (
    AutoConfig,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3MoeConfig,
)

from dpray.config.sections import EngineConfig
from dpray.engines.row_variation import has_experts
from dpray.methods.dp_sgd.training.model import load_loss
from dpray.methods.dp_sgd.training.settings import TrainingSettings
from dpray.types import InputError
from dpray.workers.engine import build_engine
from tests.engines.tiny_model import make_tokenizer


@pytest.mark.parametrize(
    ("config", "mixture"),
    [
        (MixtralConfig(num_local_experts=4), True),
        (MixtralConfig(num_local_experts=1), False),
        (Qwen3MoeConfig(), True),
        (DeepseekV3Config(), True),
        (GptOssConfig(), True),
        (AutoConfig.for_model("dbrx"), True),
        (AutoConfig.for_model("hunyuan_v1_moe"), False),  # with one expert
        (AutoConfig.for_model("hunyuan_v1_moe", num_experts=4), True),
        (Qwen3Config(), False),
        (LlamaConfig(), False),
        (AutoConfig.for_model("gpt2"), False),
        (AutoConfig.for_model("gemma3"), False),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_a_configuration_shows_experts(tmp_path: Path, config: Any, mixture: bool) -> None:
    config.save_pretrained(tmp_path)
    assert has_experts(str(tmp_path)) is mixture


@pytest.fixture(scope="module")
def mixture_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256,
        num_local_experts=4, eos_token_id=2,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(folder)
    make_tokenizer(512).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("alone", [False, True])
def test_no_private_rows_go_through_experts_in_transformers(
    mixture_folder: str, alone: bool
) -> None:
    config = EngineConfig(kind="transformers", model=mixture_folder)
    with pytest.raises(InputError, match=r"^engine\.model: .* is a mixture of experts\. .* dense"):
        build_engine(config, public_alone=alone)
    build_engine(config).close()  # public requests may


def test_no_training_goes_through_experts(mixture_folder: str) -> None:
    with pytest.raises(InputError, match="is a mixture of experts"):
        load_loss(mixture_folder, TrainingSettings(tuning="lora"))


@pytest.mark.slow
@pytest.mark.usefixtures("vllm_installed")
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_vllm_no_private_rows_go_through_experts_without_invariant_kernels(
    mixture_folder: str, alone: bool, dtype: Literal["float32", "bfloat16"]
) -> None:
    config = EngineConfig(kind="vllm", model=mixture_folder, dtype=dtype)
    with pytest.raises(InputError, match="is a mixture of experts"):
        build_engine(config, public_alone=alone)
