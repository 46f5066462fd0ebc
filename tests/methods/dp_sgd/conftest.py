"""`config` makes small DP-SGD runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dpray.config.config import Config
from dpray.methods.config import parse_config


@pytest.fixture
def config(settings: Callable[..., dict[str, Any]]) -> Callable[..., Config]:
    """Make six steps of about ten of the sixty records, in blocks of two; they cost eps 5.8."""
    method = {
        "name": "dp_sgd", "epochs": 1, "batch_size": 10, "micro_batch_size": 8, "max_length": 24,
        "lora_rank": 2, "learning_rate": 0.01, "records": 2, "noise_multiplier": 0.8,
        "checkpoint_steps": 2,
    }  # fmt: skip
    return lambda **changes: parse_config(settings(method=method, **changes))
