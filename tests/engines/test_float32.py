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


@pytest.mark.parametrize(
    "load", [pytest.param(each, marks=[pytest.mark.slow] * (each == "vllm")) for each in LOADS]
)
def test_products_are_of_float32_where_an_image_allows_tf32(
    request: pytest.FixtureRequest, model_folder: str, load: str
) -> None:
    """The images of NVIDIA set the first variable."""
    if load == "vllm":
        request.getfixturevalue("vllm_installed")
    program = (
        "import sys, torch; "
        "flags = lambda: (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32); "
        f"before = flags(); {LOADS[load]}; print(before, flags())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, model_folder],
        env=os.environ
        | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "VLLM_FLOAT32_MATMUL_PRECISION": "medium"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().splitlines()[-1] == "(True, True) (False, False)"
