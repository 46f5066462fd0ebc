"""A fine-tuned model is loaded from a folder and saved into one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dpray.mechanisms.randomness import new_key
from dpray.methods.dp_sgd.training.clipped_loss import MicroBatch
from dpray.methods.dp_sgd.training.ghost_norms import NoNormRule
from dpray.methods.dp_sgd.training.model import check_norms, held_part, load_loss, save_model
from dpray.methods.dp_sgd.training.settings import TrainingSettings
from dpray.methods.dp_sgd.training.step import DpSgdStep
from dpray.methods.dp_sgd.training.training import ReferenceTrainer
from tests.methods.dp_sgd.training.states import weights_of
from tests.methods.dp_sgd.training.tiny_gradients import SMALL, gpt2, texts

STEP = DpSgdStep(
    sampling_probability=0.5, noise_multiplier=0.5, clip_norm=1.0, expected_batch_size=4.0
)


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory, model_folder: str) -> str:
    folder = tmp_path_factory.mktemp("gpt2")
    gpt2().save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder)
    return str(folder)


def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits
    return found.detach()


def test_sums_of_bfloat16_products_are_of_float32(gpt2_folder: str) -> None:
    """torch lets a GPU add them up in bfloat16."""
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = True
    load_loss(gpt2_folder, TrainingSettings(precision="bfloat16"))
    assert not products.allow_bf16_reduced_precision_reduction


@pytest.mark.parametrize(("model", "kind"), [("llama", "lora"), ("gpt2", "lora"), ("gpt2", "full")])
def test_what_is_written_is_what_was_trained(
    kind: Any, model: str, model_folder: str, gpt2_folder: str, tmp_path: Path
) -> None:
    folder = model_folder if model == "llama" else gpt2_folder
    settings = TrainingSettings(tuning=kind, lora_rank=2, optimizer="sgd", learning_rate=0.5)
    loss = load_loss(folder, settings)
    before = logits(loss.model)
    trainer = ReferenceTrainer(STEP, settings, loss, new_key())
    for _ in range(2):
        trainer.accumulate(texts(4), (4, 30), last=True)
        trainer.add_noise()
        trainer.update()
    save_model(folder, settings, weights_of(trainer), tmp_path, folder)
    written = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(written).__name__ in ("LlamaForCausalLM", "GPT2LMHeadModel")
    torch.testing.assert_close(logits(written), logits(loss.model), rtol=1e-4, atol=1e-4)
    assert (logits(written) - before).abs().max() > 1e-3
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token_id == 2


def test_adapters_start_alike_on_every_rank_and_leave_the_model_frozen(model_folder: str) -> None:
    settings = TrainingSettings(tuning="lora", lora_rank=2)
    first, second = (load_loss(model_folder, settings).trainable_parameters() for _ in range(2))
    assert all((first[name] == second[name]).all() for name in first)
    assert first and all("lora_" in name for name in first)


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_bfloat16_has_attention_in_float32_on_a_cpu(
    model: str, model_folder: str, gpt2_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = []
    real = torch.nn.functional.scaled_dot_product_attention

    def noted(query: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        kinds.append((query.dtype, torch.is_autocast_enabled("cpu")))
        return real(query, *rest, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    folder = model_folder if model == "llama" else gpt2_folder
    batch, norms = MicroBatch.of(texts(4)), []
    for precision in ("bfloat16", "float32"):
        settings = TrainingSettings(lora_rank=2, precision=precision)  # type: ignore[arg-type]
        loss = load_loss(folder, settings)
        norms.append(loss.norms(batch, loss)[0])
    assert set(kinds) == {(torch.float32, False)}
    torch.testing.assert_close(*norms, rtol=0.1, atol=0)
    assert not torch.equal(*norms)


def deep_qwen(folder: Path) -> None:
    """Write a model of nine layers in bfloat16, of which the fifth one has another attention."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    types = ["full_attention"] * 4 + ["sliding_attention"] + ["full_attention"] * 4
    sizes = SMALL | {"num_hidden_layers": 9}
    sliding = {"use_sliding_window": True, "sliding_window": 8, "layer_types": types}
    config = Qwen3Config(**sizes, num_key_value_heads=1, head_dim=16, **sliding)
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)


def test_the_rules_are_checked_on_one_layer_of_each_kind(tmp_path: Path) -> None:
    """The other layers stay as they are in their files, mapped, and are let go of."""
    deep_qwen(tmp_path)
    settings = TrainingSettings(lora_rank=2)
    few = load_loss(str(tmp_path), settings, few_layers=True)
    names = [name for name, _ in few.named_parameters()]
    assert any("layers.4." in name for name in names)
    assert not any("layers.5." in name for name in names)
    assert {p.dtype for p in few.parameters()} == {torch.float32}
    check_norms(few, few)
    whole = dict(load_loss(str(tmp_path), settings).named_parameters())
    assert len(whole) > len(dict(few.named_parameters()))
    assert all(torch.equal(p, whole[name]) for name, p in few.named_parameters())


def test_a_layer_without_its_rule_is_found_in_the_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    deep_qwen(tmp_path)
    forward = Qwen3RMSNorm.forward
    monkeypatch.setattr(Qwen3RMSNorm, "forward", lambda norm, x: forward(norm, x) + norm.weight)
    few = load_loss(str(tmp_path), TrainingSettings(tuning="full"), few_layers=True)
    with pytest.raises(NoNormRule, match="norm"):
        check_norms(few, few)


def test_the_padding_of_a_part_is_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO pads the last part with memory that nobody wrote."""
    whole = torch.nn.Parameter(torch.ones(3))
    assert held_part(whole) is whole
    whole.ds_tensor = torch.tensor([1.0, 1.0, 1.0, math.nan])  # type: ignore[attr-defined]
    whole.ds_numel = 3  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    assert torch.isfinite(held_part(whole)).all() and len(held_part(whole)) == 3
