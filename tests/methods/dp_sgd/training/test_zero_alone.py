"""ZeRO's trainer is for a machine with torch and DeepSpeed only."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT

ABSENT = ("ray", "vllm", "pandas", "pyarrow", "dp_accounting", "opendp", "fastapi", "ahocorasick")
"""Packages that `make wheels` does not bring."""


def test_it_is_imported_where_ray_is_not() -> None:
    program = (
        f"import sys; sys.modules |= dict.fromkeys({ABSENT})\n"
        "import dpray.methods.dp_sgd.training.zero, tests.gpu.zero_rank"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
