"""`released_losses` evaluates a released fine-tuned model on texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dpray.config.config import Config
from dpray.engines.model_path import resolve_model
from dpray.methods.dp_sgd.control_codes import control_codes, text_encoder
from dpray.methods.dp_sgd.settings import DpSgdSettings
from dpray.runs.plan import Losses
from dpray.training.clipped_loss import MicroBatch, PerExampleLoss

TEXTS_PER_BATCH = 64


def released_losses(config: Config, settings: DpSgdSettings, folder: Path) -> Losses:
    """Load the model folder, or the adapter's folder, that a run of `config` released.

    A text's loss is the mean negative log-likelihood of its tokens after its control code, the
    logarithm of the perplexity.
    """
    from transformers import AutoModelForCausalLM

    base = resolve_model(config.engine.model)
    lora = settings.tuning == "lora"
    model: Any = AutoModelForCausalLM.from_pretrained(base if lora else folder, dtype="float32")
    if lora:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(folder))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loss = PerExampleLoss(model.requires_grad_(False)).eval().to(device)
    encoder, codes = text_encoder(config.engine, settings), control_codes(config.data, settings)

    def losses(texts: Sequence[str], values: Mapping[str, str]) -> list[float]:
        encoded = [encoder.training_text(codes.code(values), text) for text in texts]
        found: list[float] = []
        with torch.inference_mode():
            for start in range(0, len(encoded), TEXTS_PER_BATCH):
                batch = MicroBatch.of(encoded[start : start + TEXTS_PER_BATCH]).to(device)
                found += loss(batch.ids, batch.mask, batch.labels).tolist()
        return found

    return losses
