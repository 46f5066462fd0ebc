"""The engine of a configuration."""

from __future__ import annotations

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


def build_engine(config: EngineConfig) -> Engine:
    return make_engine(config.kind, config.model, **config.model_dump(include=OPTIONS[config.kind]))
