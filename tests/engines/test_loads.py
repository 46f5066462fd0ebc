"""Wherever private texts are read, no library logs what it sees of them: many models log their
length. Wherever private rows are computed, no GPU rounds the factors of float32 products."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
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

MODELS: dict[str, Callable[[str], object]] = {
    "engine": lambda model: load_model(model, "float32", torch.device("cpu")),
    "embedder": lambda _: SentenceTransformerEmbedder(),
    "training": lambda model: load_loss(model, TrainingSettings(tuning="lora", lora_rank=2)),
}
LOADS = MODELS | {"tokenizer": lambda model: TextCodec(model, None)}


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


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_the_length_of_a_text_is_in_no_log(
    model_folder: str, said: list[str], load: Callable[[str], object]
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
        model.eval()(torch.ones(1, 91, dtype=torch.long))
    logging.getLogger("sentence_transformers").warning("a text of 91 tokens is cut")
    assert said == []


def flags() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.fixture
def allowed() -> Iterator[None]:
    """Both kinds of products may be rounded, as in images of NVIDIA."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize("load", MODELS.values(), ids=MODELS)
def test_products_are_of_float32_where_an_image_allows_tf32(
    load: Callable[[str], object], model_folder: str
) -> None:
    assert flags() == (True, True)
    load(model_folder)
    assert flags() == (False, False)


VLLM = """
import sys, torch
from dpray.config.sections import EngineConfig
from dpray.engines.vllm.engine import VllmEngine
from triton import knobs
VllmEngine(EngineConfig(model=sys.argv[1], kv_cache_gib=0.01), private_rows=True)
assert knobs.language.fp32_default == "ieee"
print(torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("vllm_installed")
def test_so_are_vllms(model_folder: str) -> None:
    """vLLM reads the environment once in a process, which here begins as in images of NVIDIA."""
    image = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "VLLM_FLOAT32_MATMUL_PRECISION": "medium"}
    done = subprocess.run(
        [sys.executable, "-c", VLLM, model_folder],
        env=os.environ | image,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "False False"
