"""The model that is fine-tuned: from a folder into memory, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from dpray.training.clipped_loss import PerExampleLoss, Precision, check_norm_rules
from dpray.training.quiet import quiet_deepspeed
from dpray.types import InputError

ADAPTER = "adapter"


@dataclass(frozen=True)
class Tuning:
    """What of the model in `folder` is trained."""

    folder: str
    kind: Literal["lora", "full"]
    lora_rank: int = 8
    lora_alpha: float = 16.0
    precision: Precision = "float32"
    checkpointing: bool = False
    name: str | None = None
    """What adapters that are written call the model they belong to; None: its folder."""


def load_loss(tuning: Tuning) -> PerExampleLoss:
    """The model, whole on the CPU with float32 weights, as per-example losses; dropout is off.

    Raises NoNormRule where the norms of its gradients cannot be had, InputError where weights are
    not finite.
    """
    model = _trainable(tuning)
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise InputError(f"engine.model: {tuning.folder}: not finite: some weights of {name}")
    loss = PerExampleLoss(model, tuning.precision, tuning.checkpointing).eval()
    check_norm_rules(loss, model.config.get_text_config().vocab_size)
    return loss


def trainable_parameters(loss: PerExampleLoss) -> dict[str, nn.Parameter]:
    return {name: p for name, p in loss.model.named_parameters() if p.requires_grad}


def save_model(tuning: Tuning, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """The fine-tuned model as a plain folder with its tokenizer: adapters are merged, and stand by
    themselves, with the tokenizer too, in the folder `ADAPTER`.

    `weights` are the trained ones by their `trainable_parameters` names.
    """
    model = _trainable(tuning)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            parameters[name].copy_(weight)
    tokenizer = AutoTokenizer.from_pretrained(tuning.folder)
    with quiet_deepspeed():
        if tuning.kind == "lora":
            for adapters in model.peft_config.values():
                adapters.base_model_name_or_path = tuning.name or tuning.folder
            model.save_pretrained(folder / ADAPTER)
            tokenizer.save_pretrained(folder / ADAPTER)
            model = model.merge_and_unload()
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _trainable(tuning: Tuning) -> Any:
    disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(tuning.folder, dtype="float32")
    if tuning.kind == "lora":
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(
            task_type="CAUSAL_LM",
            r=tuning.lora_rank,
            lora_alpha=tuning.lora_alpha,  # type: ignore[arg-type]
            target_modules="all-linear",
            fan_in_fan_out=any(type(m).__name__ == "Conv1D" for m in model.modules()),
        )
        # The adapters' random start is public, and the same on every rank.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = get_peft_model(model, adapters)
    return model
