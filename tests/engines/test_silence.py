"""No library logs what it sees of a private text: its length is in lines of many models."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import BigBirdConfig, BigBirdModel
from transformers.utils import logging as levels

from dpray.engines.embedder import SentenceTransformerEmbedder
from dpray.engines.passes import load_model
from dpray.engines.text import TextCodec
from dpray.methods.dp_sgd.training.model import load_loss
from dpray.methods.dp_sgd.training.settings import TrainingSettings

LIBRARIES = ("transformers", "sentence_transformers")


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What libraries log whose levels a person has set."""
    kept = Kept()
    before = {name: logging.getLogger(name).level for name in LIBRARIES}
    levels.set_verbosity_debug()
    for name in LIBRARIES:
        logging.getLogger(name).setLevel(logging.DEBUG)
        logging.getLogger(name).addHandler(kept)
    yield kept.lines
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).removeHandler(kept)


LOADS: list[Callable[[str], Any]] = [
    lambda model: load_model(model, "float32", torch.device("cpu")),
    lambda model: TextCodec(model, None),
    lambda model: load_loss(model, TrainingSettings(lora_rank=2)),
    lambda model: SentenceTransformerEmbedder(),
]


@pytest.mark.parametrize("length", [91, 93])
@pytest.mark.parametrize("load", LOADS, ids=["engine", "tokenizer", "training", "embedder"])
def test_the_length_of_a_text_is_in_no_log(
    model_folder: str, said: list[str], load: Callable[[str], Any], length: int
) -> None:
    load(model_folder)
    said.clear()
    keys: dict[str, Any] = {"attention_type": "block_sparse", "block_size": 4}
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_random_blocks": 1}
    model = BigBirdModel(BigBirdConfig(**keys, **sizes, **heads, max_position_embeddings=128))
    logger = logging.getLogger("transformers.models.big_bird.modeling_big_bird")
    type(logger).warning_once.cache_clear()  # type: ignore[attr-defined]
    with torch.inference_mode():
        model.eval()(torch.ones(1, length, dtype=torch.long))
    logging.getLogger("sentence_transformers").warning("a text of %s tokens is cut", length)
    assert said == []
