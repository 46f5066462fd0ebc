"""The memory and the time that batches take, from public numbers alone: no model is loaded, no data
opened."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from dpray.config.sections import EngineConfig
from dpray.engines.kv_cache import (
    GIB,
    bytes_per_token,
    cpu_cache_bytes,
    gpu_cache_bytes,
    parameters,
)

CPU_FLOPS = 2e10
"""Rough float32 operations per second of one core, measured with SmolLM2-135M in vLLM on two
cores."""

LONG_HOURS = 0.5
"""A plan that may take longer on a CPU says so."""


@dataclass(frozen=True)
class BatchMemory:
    """The rows that the engine holds at once, and how long they take on a CPU.

    A row has at most `row_tokens` tokens: its prompt, with a text of `method.max_prompt_tokens`,
    and what is drawn. Each token takes `token_bytes` in the KV cache of `cache_bytes`. `most_rows`
    is `engine.max_num_seqs`, or None. `token_seconds` is the time of a token on all cores of this
    machine, or None on a GPU.
    """

    row_tokens: int
    token_bytes: int
    cache_bytes: int
    most_rows: int | None
    place: str
    token_seconds: float | None

    @property
    def rows_at_once(self) -> int:
        rows = self.cache_bytes // (self.row_tokens * self.token_bytes)
        return max(1, rows if self.most_rows is None else min(rows, self.most_rows))

    def parts(self, rows: int) -> int:
        """Return the number of parts in which a batch of `rows` rows is decoded."""
        return -(-rows // self.rows_at_once)

    def most_hours(self, rows: int) -> float | None:
        """Return an upper estimate, in hours, of decoding `rows` rows one after another; None on a
        GPU."""
        if self.token_seconds is None:
            return None
        return rows * self.row_tokens * self.token_seconds / 3600

    def summary(self, rows: int) -> dict[str, Any]:
        return {
            "row_tokens": self.row_tokens,
            "kv_cache_bytes": self.cache_bytes,
            "kv_cache_bytes_per_token": self.token_bytes,
            "rows_at_once": self.rows_at_once,
            "rows_of_a_batch": rows,
            "parts": self.parts(rows),
        }

    def describe(self, rows: int) -> str:
        how = "whole" if self.parts(rows) == 1 else f"in {self.parts(rows)} parts"
        return (
            f"{self.rows_at_once} rows of {self.row_tokens} tokens at once, in "
            f"{self.cache_bytes / GIB:.1f} GiB of KV cache {self.place}; batches of up to about "
            f"{rows} rows are decoded {how}"
        )

    def warnings(self, rows: int, all_rows: int) -> list[str]:
        """Warn of batches of `rows` rows that do not fit, and of a run of `all_rows` rows that
        takes long."""
        found = []
        if self.parts(rows) > 1:
            found.append(
                f"method.batch_size: batches of up to about {rows} rows do not fit the "
                f"{self.rows_at_once} rows that the engine holds {self.place}: the others are "
                "computed anew for every token, which is slow. A smaller method.batch_size (auto "
                "takes what fits) or method.max_prompt_tokens helps, or a larger "
                "engine.max_num_seqs, engine.kv_cache_gib (CPU) or GPU"
            )
        hours = self.most_hours(all_rows)
        if hours is not None and hours > LONG_HOURS:
            found.append(
                f"engine.model: on this machine's CPU the run takes up to about {hours:.1f} hours "
                "(a rough estimate, for texts of full length). Fewer texts (method.max_records), "
                "a smaller method.batch_size or model, or a GPU help"
            )
        return found


def batch_memory(
    engine: EngineConfig, model_config: Any, row_tokens: int, usual_rows: int
) -> BatchMemory:
    """Return the memory of batches whose rows have `row_tokens` tokens, on the GPU that
    `engine.gpu_memory_gib` names or this machine has, else on its CPU."""
    token_bytes = bytes_per_token(model_config, engine.dtype)
    most = engine.max_num_seqs if engine.kind == "vllm" else None
    on_gpu = gpu_cache_bytes(engine, model_config)
    if on_gpu is not None:
        place = "on one GPU" if engine.gpus == 1 else f"on {engine.gpus} GPUs"
        return BatchMemory(row_tokens, token_bytes, on_gpu, most, place, None)
    cache_bytes = cpu_cache_bytes(engine, usual_rows * row_tokens * token_bytes)
    seconds = 2 * parameters(model_config) / (CPU_FLOPS * (os.cpu_count() or 1))
    place = "on this machine's CPU"
    return BatchMemory(row_tokens, token_bytes, cache_bytes, most, place, seconds)
