"""A pytest plugin with which vLLM's second model runner runs on a CPU: `pytest -p
tests.engines.interpreted`.

Triton's interpreter runs the runner's kernels, which are vLLM's own, as are its scheduler, sampler
and request states. vLLM's CPU build refuses that runner where Triton has no backend for CPUs, and
turns asynchronous scheduling off: both are undone here, before vLLM is imported.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import SimpleNamespace
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "VLLM_USE_V2_MODEL_RUNNER": "1"}

backends = import_module("triton.backends").backends
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
platform = import_module("vllm.platforms.cpu").CpuPlatform
update = platform.check_and_update_config


def update_and_schedule_ahead(config: Any) -> None:
    wanted = config.scheduler_config.async_scheduling
    update(config)
    config.scheduler_config.async_scheduling = wanted


platform.check_and_update_config = staticmethod(update_and_schedule_ahead)
