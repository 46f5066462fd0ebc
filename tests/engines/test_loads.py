"""Wherever private rows are computed, a GPU may not round the factors of float32 products."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from dpray.engines.embedder import SentenceTransformerEmbedder
from dpray.engines.passes import load_model
from dpray.methods.dp_sgd.training.model import load_loss
from dpray.methods.dp_sgd.training.settings import TrainingSettings

LOADS: dict[str, Callable[[str], object]] = {
    "transformers": lambda model: load_model(model, "float32", torch.device("cpu")),
    "an embedder": lambda _: SentenceTransformerEmbedder(),
    "dp_sgd": lambda model: load_loss(model, TrainingSettings(tuning="lora")),
}


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
@pytest.mark.parametrize("load", LOADS)
def test_products_are_of_float32_where_an_image_allows_tf32(load: str, model_folder: str) -> None:
    assert flags() == (True, True)
    LOADS[load](model_folder)
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
