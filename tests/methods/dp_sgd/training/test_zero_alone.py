"""ZeRO's trainer is for a machine with torch and DeepSpeed only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

ABSENT = ("ray", "vllm", "pandas", "pyarrow", "dp_accounting", "opendp", "fastapi", "ahocorasick")
"""Packages that `make wheels` does not bring."""


def test_it_trains_under_torchrun_where_ray_is_not(tmp_path: Path) -> None:
    """Python imports `sitecustomize` before all else, in every rank."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys; sys.modules |= dict.fromkeys({ABSENT})\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node=2", "-m", "tests.gpu.zero_rank"),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = [(row["stage"], row["model"]) for row in rows]
    assert found == [(2, "gpt2"), (2, "llama_lora"), (3, "gpt2"), (3, "llama_lora")]
    for row in rows:
        assert (row["ranks"], row["backend"], row["with Ray"]) == (2, "gloo", False)
        assert row["off the reference"] < 1e-4 < 1e-2 < row["weights moved"]
