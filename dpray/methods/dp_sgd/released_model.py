"""A fine-tuned model as it is released, asked how likely it holds a text to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dpray.config.config import Config
from dpray.engines.model_path import check_model_path
from dpray.engines.text import TextCodec
from dpray.methods.dp_sgd.algorithm import TextEncoder
from dpray.methods.dp_sgd.control_codes import control_codes
from dpray.methods.dp_sgd.settings import DpSgdSettings
from dpray.training.clipped_loss import MicroBatch, PerExampleLoss

AT_ONCE = 64
"""Texts that go through the model together."""


class ReleasedModel:
    """The model folder, or the adapter's folder, that a run of `config` released."""

    def __init__(self, config: Config, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        settings = config.method
        assert isinstance(settings, DpSgdSettings)
        base = check_model_path(config.engine.model)
        lora = settings.tuning == "lora"
        model: Any = AutoModelForCausalLM.from_pretrained(base if lora else folder, dtype="float32")
        if lora:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(folder))
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._loss = PerExampleLoss(model.requires_grad_(False)).eval().to(self._device)
        codec = TextCodec(base, config.engine.max_model_len)
        self._encoder = TextEncoder(
            codec.ids, codec.eos_ids[0], settings.max_length, codec.start_id
        )
        self._codes = control_codes(config.data, settings)

    def losses(self, texts: Sequence[str], values: Mapping[str, str]) -> list[float]:
        """Mean negative log-likelihood of each text's tokens after its control code: the logarithm
        of the perplexity."""
        code = self._codes.code(values)
        encoded = [self._encoder.training_text(code, text) for text in texts]
        losses: list[float] = []
        with torch.inference_mode():
            for start in range(0, len(encoded), AT_ONCE):
                batch = MicroBatch.of(encoded[start : start + AT_ONCE]).to(self._device)
                losses += self._loss(batch.ids, batch.mask, batch.labels).tolist()
        return losses
