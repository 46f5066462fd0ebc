"""The engine of a configuration."""

from __future__ import annotations

from pathlib import Path

from dpray.config import EngineConfig
from dpray.engines.base import Engine
from dpray.engines.factory import make_engine

OPTIONS = {
    "vllm": {
        "dtype",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "tensor_parallel_size",
        "gpu_memory_utilization",
        "kv_cache_gib",
    },
    "transformers": {"dtype", "max_model_len"},
    "openai": {"base_url", "api_key", "api", "max_in_flight", "attempts", "timeout"},
}
"""The keys of `engine` that each backend has a use for."""


def with_absolute_model(config: EngineConfig) -> EngineConfig:
    """Make the model's folder absolute, for actors with another working directory. One that is not
    here is left as it is: it may be on their nodes."""
    model = Path(config.model).expanduser()
    if not model.is_dir():
        return config
    return config.model_copy(update={"model": str(model.absolute())})


def build_engine(config: EngineConfig) -> Engine:
    return make_engine(config.kind, config.model, **config.model_dump(include=OPTIONS[config.kind]))
