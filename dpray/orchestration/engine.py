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


def build_engine(config: EngineConfig, *, public_alone: bool | None = None) -> Engine:
    """The engine of this section. `public_alone` is given where it decodes groups of private rows:
    whether tokens are cut out by a public row's logits (see `VllmEngine`)."""
    options = config.model_dump(include=OPTIONS[config.kind])
    if config.kind == "vllm" and public_alone is not None:
        options |= {"private_rows": True, "public_alone": public_alone}
    return make_engine(config.kind, config.model, **options)
