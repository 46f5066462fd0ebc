"""Wherever private rows are computed, a GPU may not round the factors of float32 products."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LOADS = {
    "transformers": "from dpray.engines.transformers import load_model; "
    "load_model(sys.argv[1], 'float32', torch.device('cpu'))",
    "an embedder": "from dpray.engines.embedder import SentenceTransformerEmbedder; "
    "SentenceTransformerEmbedder()",
    "vllm": "from dpray.config.sections import EngineConfig; "
    "from dpray.engines.vllm.engine import VllmEngine; "
    "VllmEngine(EngineConfig(model=sys.argv[1], kv_cache_gib=0.01), private_rows=True); "
    "from triton import knobs; assert knobs.language.fp32_default == 'ieee'",
    "dp_sgd": "from dpray.methods.dp_sgd.training.model import load_loss; "
    "from dpray.methods.dp_sgd.training.settings import TrainingSettings; "
    "load_loss(sys.argv[1], TrainingSettings(tuning='lora'))",
}


PROGRAM = """
import os, sys, torch, transformers
flags = lambda: (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
for load in sys.argv[2:]:
    before = flags()
    if os.fork() == 0:
        exec(load)
        print(before, flags(), flush=True)
        os._exit(0)
    os.wait()
"""
"""Each load in a fork of a process that has imported the libraries."""


def seen(model: str, *loads: str) -> list[str]:
    """Return the flags before and after each load, where an image sets the first variable, as
    NVIDIA's do."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, model, *(LOADS[load] for load in loads)],
        env=os.environ
        | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "VLLM_FLOAT32_MATMUL_PRECISION": "medium"},
        capture_output=True,
        text=True,
        check=True,
    )
    return [line for line in done.stdout.splitlines() if line.startswith("(")]


REFUSED = "(True, True) (False, False)"


def test_products_are_of_float32_where_an_image_allows_tf32(model_folder: str) -> None:
    assert seen(model_folder, "transformers", "an embedder", "dp_sgd") == [REFUSED] * 3


@pytest.mark.slow
@pytest.mark.usefixtures("vllm_installed")
def test_so_are_vllms(model_folder: str) -> None:
    assert seen(model_folder, "vllm") == [REFUSED]
