"""The configuration of `dpray serve`: `engine`, `embedder`, `serve` and `runtime`.

Serving needs no data, budget or method, so its file has a top level of its own.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from dpray.config.sections import (
    Count,
    EmbedderConfig,
    EngineConfig,
    NotNegative,
    Positive,
    RuntimeConfig,
    Section,
)
from dpray.io.bucket import in_bucket, shown_name
from dpray.io.settings_file import parse, read_tree

LOOPBACK = "127.0.0.1"
_HASHED = re.compile(r"sha256:[0-9a-f]{64}")


class ReplicasConfig(Section):
    """The name, the scale and the resources of a model's deployment."""

    name: str | None = Field(
        None, description="what clients call it; null: the model's name, of a folder the last part"
    )
    min_replicas: int = Field(
        1,
        ge=0,
        description="the fewest replicas; with 0 the last one ends when there are no requests, and "
        "the next request waits until the model is loaded",
    )
    max_replicas: Count = Field(1, description="the most; Serve scales between the two by load")
    upscale_delay_seconds: NotNegative = Field(
        30.0, description="how long the load is too high before a replica is added"
    )
    downscale_delay_seconds: NotNegative = Field(
        600.0, description="how long it is too low before one is ended"
    )
    target_ongoing_requests: Positive = Field(
        16.0,
        description="requests in flight that a replica should have; with more, replicas are added",
    )
    max_ongoing_requests: Count = Field(64, description="the most requests in flight in a replica")
    max_queued_requests: Count = Field(
        256, description="requests that wait for a replica; any more get a 503"
    )
    cpus_per_replica: NotNegative = Field(1.0, description="logical CPUs of a replica")
    gpus_per_replica: NotNegative = Field(0.0, description="GPUs of a replica")

    @model_validator(mode="after")
    def _ordered(self) -> ReplicasConfig:
        if self.max_replicas < self.min_replicas:
            raise ValueError("max_replicas: not smaller than min_replicas")
        if self.target_ongoing_requests > self.max_ongoing_requests:
            raise ValueError("target_ongoing_requests: not greater than max_ongoing_requests")
        return self


class ServedLLM(ReplicasConfig):
    max_tokens_in_flight: Count | None = Field(
        None,
        description="tokens of prompts and answers in flight in a replica, at most what its KV "
        "cache holds; null: engine.max_num_seqs times the context",
    )


class ServedEmbedder(ReplicasConfig):
    max_texts_in_flight: Count = Field(512, description="texts of requests in flight in a replica")


class LimitsConfig(Section):
    max_request_bytes: Count = Field(1_000_000, description="a longer request body gets a 413")
    max_request_entries: Count = Field(
        4096, description="entries in all lists and objects of a body; with more it gets a 413"
    )
    body_timeout_seconds: Positive = Field(
        30.0, description="a body that takes longer to arrive gets a 408"
    )
    max_in_flight_per_key: Count = Field(
        128, description="requests in flight of one key, in all gateways; any more get a 429"
    )
    requests_per_minute_per_key: Count | None = Field(
        None, description="requests of one key in a minute, in all gateways; any more get a 429"
    )
    request_timeout_seconds: Positive = Field(
        600.0, description="a request that takes longer is ended with a 504"
    )


class ServeConfig(Section):
    host: str = Field(LOOPBACK, min_length=1, description="the address Serve's HTTP port binds")
    port: int = Field(8000, ge=1, le=65535, description="of HTTP")
    auth: Literal["keys", "none"] = Field(
        "keys", description="'none': everybody who reaches the port; on 127.0.0.1 only"
    )
    keys: tuple[str, ...] = Field(
        (), description='the hash of each API key, "sha256:HEX", never the key itself'
    )
    gateways: Count = Field(
        1,
        description="processes that take requests; each gives away its part of all limits",
    )
    limits: LimitsConfig = LimitsConfig()
    llm: ServedLLM | None = Field(
        ServedLLM(), description="the LLM of `engine`; null, or no `engine`: not served"
    )
    embedder: ServedEmbedder | None = Field(
        ServedEmbedder(), description="the model of `embedder`; null, or none: not served"
    )

    @field_validator("keys", mode="before")
    @classmethod
    def _are_hashes(cls, keys: object) -> object:
        # pydantic's message would quote a key that was pasted here by mistake.
        if not isinstance(keys, list | tuple):
            raise ValueError('a list of "sha256:HEX"')
        for number, key in enumerate(keys, start=1):
            if not (isinstance(key, str) and _HASHED.fullmatch(key)):
                raise ValueError(
                    f'entry {number} is not "sha256:" and the 64 hex digits of a key\'s hash'
                )
        return tuple(keys)

    @model_validator(mode="after")
    def _closed_or_local(self) -> ServeConfig:
        if self.auth == "keys" and not self.keys:
            raise ValueError('keys: give the hash of a key ("sha256:HEX"), or set auth: none')
        if self.auth == "none" and self.keys:
            raise ValueError("keys: are not asked for with auth: none")
        if self.auth == "none" and self.host != LOOPBACK:
            raise ValueError(f"host: with auth: none it has to be {LOOPBACK}")
        return self


class ServeFile(Section):
    engine: EngineConfig | None = None
    embedder: EmbedderConfig | None = None
    serve: ServeConfig
    runtime: RuntimeConfig = RuntimeConfig()

    @model_validator(mode="after")
    def _servable(self) -> ServeFile:
        if not (self.llm_name or self.embedder_name):
            raise ValueError("serve: nothing to serve: give engine, embedder, or both")
        if self.runtime.ray_address == "none":
            raise ValueError("runtime.ray_address: serving needs Ray")
        if self.embedder is not None and self.embedder.kind == "openai":
            raise ValueError("embedder.kind: an endpoint of another one is not served again")
        if self.engine is not None and self.serve.llm is not None:
            if self.engine.kind != "vllm":
                raise ValueError("engine.kind: only vllm serves a language model")
            if self.engine.pipeline_parallel_size > 1:
                raise ValueError("engine.pipeline_parallel_size: a served model has one stage")
            split, gpus = self.engine.tensor_parallel_size, self.serve.llm.gpus_per_replica
            if split > 1 and gpus != split:
                raise ValueError(
                    "serve.llm.gpus_per_replica: one for each of engine.tensor_parallel_size"
                )
        if self.llm_name == self.embedder_name:
            raise ValueError("serve.llm.name: is the embedder's too")
        return self

    @property
    def llm_name(self) -> str | None:
        """Return what clients call the language model, None if it is not served."""
        if self.engine is None or self.serve.llm is None:
            return None
        return self.serve.llm.name or _public_name(self.engine.model)

    @property
    def embedder_name(self) -> str | None:
        """Return what clients call the embedder, None if it is not served."""
        if self.embedder is None or self.serve.embedder is None:
            return None
        return self.serve.embedder.name or _public_name(self.embedder.model)


def _public_name(model: str) -> str:
    """Return a hub's name, or the last part of a folder: clients need not know its path."""
    if in_bucket(model):
        return shown_name(model)
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() or path.is_absolute() else model


def load_serve_config(path: str | Path, overrides: list[str] | None = None) -> ServeFile:
    """Read a serve file, with `key.sub=value` overrides. Raises InputError that names the key."""
    return parse(ServeFile, read_tree(path, overrides or []))
