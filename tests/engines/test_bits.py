"""The bits that a model needs for a public text, by every engine."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dpray.engines import bits
from dpray.engines.base import Engine, PlainPrompt
from dpray.engines.bits import bits_per_byte

TEXT = "the heart is fine, ß 天气 العربية " * 3


def test_bits_are_those_of_one_pass_over_the_text(engine: Engine, model_folder: str) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    begun = engine.truncate(TEXT, min(bits.MOST_TOKENS, engine.context_length // 2))
    ids = torch.tensor([engine.encode(PlainPrompt(begun))])
    with torch.inference_mode():
        likely = model(ids).logits[0, :-1].log_softmax(-1)
    nats = -likely.gather(1, ids[0, 1:, None]).sum().item()
    found = bits_per_byte(engine, TEXT)
    assert found == pytest.approx(nats / math.log(2) / len(begun.encode()), rel=1e-3)
    assert bits_per_byte(engine, "") is None
