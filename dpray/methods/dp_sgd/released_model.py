"""`ReleasedModel` computes losses of texts under a released fine-tuned model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dpray.config.config import Config
from dpray.engines.model_path import check_model_path
from dpray.methods.dp_sgd.control_codes import control_codes, text_encoder
from dpray.methods.dp_sgd.settings import DpSgdSettings
from dpray.training.clipped_loss import MicroBatch, PerExampleLoss

TEXTS_PER_BATCH = 64


class ReleasedModel:
    """Holds the model folder, or the adapter's folder, that a run of `config` released."""

    def __init__(self, config: Config, settings: DpSgdSettings, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        base = check_model_path(config.engine.model)
        lora = settings.tuning == "lora"
        model: Any = AutoModelForCausalLM.from_pretrained(base if lora else folder, dtype="float32")
        if lora:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(folder))
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._loss = PerExampleLoss(model.requires_grad_(False)).eval().to(self._device)
        self._encoder = text_encoder(config.engine, settings)
        self._codes = control_codes(config.data, settings)

    def losses(self, texts: Sequence[str], values: Mapping[str, str]) -> list[float]:
        """Return the mean negative log-likelihood of each text's tokens after its control code, the
        logarithm of the perplexity."""
        code = self._codes.code(values)
        encoded = [self._encoder.training_text(code, text) for text in texts]
        losses: list[float] = []
        with torch.inference_mode():
            for start in range(0, len(encoded), TEXTS_PER_BATCH):
                texts_B = encoded[start : start + TEXTS_PER_BATCH]
                batch = MicroBatch.of(texts_B).to(self._device)
                losses += self._loss(batch.ids, batch.mask, batch.labels).tolist()
        return losses
