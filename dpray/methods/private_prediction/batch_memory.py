"""The memory that a batch takes, from public numbers alone: no model is loaded, no data opened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dpray.config.sections import EngineConfig
from dpray.engines.kv_cache import GIB, bytes_per_token, cpu_cache_bytes, gpu_cache_bytes


@dataclass(frozen=True)
class BatchMemory:
    """The rows that the engine holds at once.

    A row has at most `row_tokens` tokens: its prompt, with a text of `method.max_prompt_tokens`,
    and what is drawn. Each token takes `token_bytes` in the KV cache of `cache_bytes`. `most_rows`
    is `engine.max_num_seqs`, or None. `place` names the device.
    """

    row_tokens: int
    token_bytes: int
    cache_bytes: int
    most_rows: int | None
    place: str

    @property
    def rows_at_once(self) -> int:
        rows = self.cache_bytes // (self.row_tokens * self.token_bytes)
        return max(1, rows if self.most_rows is None else min(rows, self.most_rows))

    def parts(self, rows: int) -> int:
        """Return in how many parts a batch of `rows` rows is decoded."""
        return -(-rows // self.rows_at_once)

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

    def slow(self, rows: int) -> str | None:
        """Return a warning if batches do not fit: the model then reads what does not fit anew for
        every token."""
        if self.parts(rows) == 1:
            return None
        return (
            f"method.batch_size: batches of up to about {rows} rows do not fit the "
            f"{self.rows_at_once} rows that the engine holds {self.place}: the others are computed "
            "anew for every token, which is slow. A smaller method.batch_size (auto takes what "
            "fits) or method.max_prompt_tokens helps, or a larger engine.max_num_seqs, "
            "engine.kv_cache_gib (CPU) or GPU"
        )


def batch_memory(
    engine: EngineConfig, model_config: Any, row_tokens: int, usual_rows: int
) -> BatchMemory:
    """Return the memory of batches whose rows have `row_tokens` tokens, on the GPU that
    `engine.gpu_memory_gib` names or this machine has, else on its CPU."""
    token_bytes = bytes_per_token(model_config, engine.dtype)
    cache_bytes, place = gpu_cache_bytes(engine, model_config), "on one GPU"
    if cache_bytes is None:
        needed = usual_rows * row_tokens * token_bytes
        cache_bytes, place = cpu_cache_bytes(engine, needed), "on this machine's CPU"
    elif engine.gpus > 1:
        place = f"on {engine.gpus} GPUs"
    most = engine.max_num_seqs if engine.kind == "vllm" else None
    return BatchMemory(row_tokens, token_bytes, cache_bytes, most, place)
