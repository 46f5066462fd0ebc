"""`load_loss` loads the model that is fine-tuned, `save_model` saves it."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from dpray.config.training import TrainingSettings
from dpray.engines.model_path import resolve_model
from dpray.training.clipped_loss import PerExampleLoss, check_norm_rules
from dpray.types import InputError

ADAPTER = "adapter"


def load_loss(folder: str, settings: TrainingSettings) -> PerExampleLoss:
    """Load the model in `folder`, whole on the CPU with float32 weights, as per-example losses;
    dropout is off.

    Raises NoNormRule where a trainable layer has no rule for the norms of its gradients, InputError
    where weights are not finite.
    """
    model = _trainable(folder, settings)
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise InputError(f"engine.model: {folder}: not finite: some weights of {name}")
    loss = PerExampleLoss(model, settings.precision, settings.gradient_checkpointing).eval()
    check_norm_rules(loss, model.config.get_text_config().vocab_size)
    return loss


def save_model(
    base: str, settings: TrainingSettings, weights: Mapping[str, torch.Tensor], folder: Path,
    base_name: str,
) -> None:  # fmt: skip
    """Save the fine-tuned model as a plain folder with its tokenizer. Adapters are merged; they are
    also saved by themselves, with the tokenizer, in the folder `ADAPTER`, and call the model they
    belong to `base_name`.

    `weights` are the trained ones by their names in `PerExampleLoss.trainable_parameters`.
    """
    model = _trainable(base, settings)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            parameters[name].copy_(weight)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(base))
    with deepspeed_on_stderr():
        if settings.tuning == "lora":
            for adapters in model.peft_config.values():
                adapters.base_model_name_or_path = base_name
            model.save_pretrained(folder / ADAPTER)
            tokenizer.save_pretrained(folder / ADAPTER)
            model = model.merge_and_unload()
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _trainable(folder: str, settings: TrainingSettings) -> Any:
    disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(resolve_model(folder), dtype="float32")
    if settings.tuning == "lora":
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(
            task_type="CAUSAL_LM",
            r=settings.lora_rank,
            lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]
            target_modules="all-linear",
            fan_in_fan_out=any(type(m).__name__ == "Conv1D" for m in model.modules()),
        )
        # The adapters' random start is public, and the same on every rank.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = get_peft_model(model, adapters)
    return model


@contextlib.contextmanager
def deepspeed_on_stderr() -> Iterator[Any]:
    """Import `deepspeed` and send its prints to the standard error: the standard output is the
    command's. Enter it around everything that imports DeepSpeed, as saving a transformers model
    does."""
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # A helper for CPU ranks that would be compiled at the first start: gloo does without.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        yield deepspeed
