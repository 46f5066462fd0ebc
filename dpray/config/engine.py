"""The section `engine` says which language model is used, and how it runs."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from dpray.config.base import Count, Positive, Section


class EngineConfig(Section):
    kind: Literal["vllm", "transformers", "openai", "none"] = Field(
        "vllm", description="none: no language model (dp_kps only: the sequences themselves)"
    )
    model: str = Field("", description="a folder, or a model's name on its hub")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: the model's own; float32 for private prediction"
    )
    max_model_len: Count | None = Field(None, description="context length; null: the model's own")
    max_num_seqs: Count = Field(512, description="most prompts decoded at once by vLLM")
    max_num_batched_tokens: Count | None = Field(
        None, description="most tokens in one step of vLLM; null: chosen by the engine"
    )
    tensor_parallel_size: Count = Field(1, description="GPUs that vLLM splits the model over")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    kv_cache_gib: Positive = Field(2.0, description="KV cache of the vLLM engine on a CPU")
    base_url: str | None = Field(None, description="the URL of an OpenAI-compatible endpoint")
    api_key: str | None = Field(None, repr=False, description="the key of that endpoint")
    api: Literal["chat", "completions"] = Field(
        "chat", description="the API of that endpoint; completions for a base model"
    )
    max_in_flight: Count = Field(64, description="concurrent requests to that endpoint")
    attempts: Count = Field(6, description="tries of a request before the run stops for now")
    timeout: Positive = Field(120.0, description="seconds to wait for an answer of that endpoint")

    @property
    def is_local(self) -> bool:
        """Return whether the model runs in dpray's own processes."""
        return self.kind in ("vllm", "transformers")

    @property
    def gpus(self) -> int:
        """Return the GPUs of one copy of the model, which transformers does not split."""
        return self.tensor_parallel_size if self.kind == "vllm" else 1

    @field_validator("base_url")
    @classmethod
    def _no_credentials(cls, url: str | None) -> str | None:
        # A release holds its configuration.
        if url is not None and "@" in urlsplit(url).netloc:
            raise ValueError("a name or password has no place in it; give engine.api_key")
        return url
