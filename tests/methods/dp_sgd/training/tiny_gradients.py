"""Make small random language models, random texts, and per-example gradients the plain way."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from dpray.methods.dp_sgd.training.clipped_loss import MicroBatch, PerExampleLoss
from dpray.methods.dp_sgd.training.step import TrainingText

VOCABULARY = 97

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 0,
}
"""The sizes of the models with rotary positions."""


def gpt2(width: int = 32, tied: bool = True) -> Any:
    """Return a model with Conv1D, LayerNorm and position embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=width,
        n_layer=2,
        n_head=2,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=tied,
    )
    return GPT2LMHeadModel(config).eval()


def llama(tied: bool = False) -> Any:
    """Return a model with RMSNorm, grouped queries and an embedding with a padding row."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SMALL, num_key_value_heads=1, tie_word_embeddings=tied)
    return LlamaForCausalLM(config).eval()


def phi3(turning: int) -> Any:
    """Return a model with LongRoPE: beyond `turning` tokens it turns by other angles."""
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": turning}
    config = Phi3Config(
        **SMALL,
        original_max_position_embeddings=turning,
        rope_parameters=rope | {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8},
    )
    return Phi3ForCausalLM(config).eval()


def lora(model: Any) -> Any:
    """Return the model with adapters on every linear layer, none of them zero."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=3,
        target_modules="all-linear",
        fan_in_fan_out=type(model).__name__ == "GPT2LMHeadModel",
    )
    adapted: Any = get_peft_model(model, config)
    fixed = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=fixed))
    return adapted.eval()


def texts(count: int, seed: int = 0, longest: int = 24) -> list[TrainingText]:
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        length = rng.randint(3, longest)
        ids = tuple(rng.randrange(VOCABULARY) for _ in range(length))
        found.append(TrainingText(ids, rng.randint(0, length // 2)))
    return found


def plain_loss(model: nn.Module, text: TrainingText) -> torch.Tensor:
    """Return the mean negative log-likelihood of a text's own tokens, without padding."""
    ids = torch.tensor([text.ids], device=trainable(model)[0].device)
    log_p = torch.log_softmax(model(input_ids=ids).logits[0].float(), -1)
    own = [-log_p[i - 1, text.ids[i]] for i in range(max(1, text.given), len(text.ids))]
    return torch.stack(own).mean()


def plain_gradient(model: nn.Module, text: TrainingText) -> torch.Tensor:
    """Return one text's gradient, all trainable parameters in a row."""
    parameters = trainable(model)
    found = torch.autograd.grad(plain_loss(model, text), parameters, allow_unused=True)
    pairs = zip(parameters, found, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in pairs])


def trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in trainable(model)])


def plain_clipped_sum(model: torch.nn.Module, batch: list[TrainingText], c: float) -> torch.Tensor:
    total = torch.zeros_like(flat(model))
    for text in batch:
        gradient = plain_gradient(model, text)
        total += gradient * min(1.0, c / float(gradient.double().norm()))
    return total


def clipped_sum(
    loss: PerExampleLoss,
    batch: list[TrainingText],
    clip_norm: float,
    size: int,
    two_passes: bool = False,
) -> torch.Tensor:
    """Return the sum that the code under test makes, in micro-batches of `size`, on the device that
    the model is on."""
    parameters = trainable(loss)
    loss.two_passes = two_passes
    for parameter in parameters:
        parameter.grad = None
    for start in range(0, len(batch), size) or [0]:
        micro_batch = MicroBatch.of(batch[start : start + size]).to(parameters[0].device)
        with loss.clipped(micro_batch, clip_norm) as clipped:
            clipped.backward()
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters]
    )
