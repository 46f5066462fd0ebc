"""The memory of a model's KV cache, from its configuration and the machine's size."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from dpray.config.sections import EngineConfig
from dpray.extras import Late, is_installed, require, torch

if TYPE_CHECKING:
    import transformers
else:
    transformers = Late("transformers")

GIB = 2**30

DEFAULT_BYTES = 2 * GIB
"""The smallest KV cache on a CPU."""

CACHE_DIVISOR = 4
"""By default the KV cache takes at most a quarter of a machine's memory: the model and the rest of
the run have to fit, too."""

CHOICE = 2**29
"""The bytes of a GPU that the choice of a step's tokens takes, whatever its rows and groups."""

CHOICE_OF_LOGIT = 3 * 4 + 1
"""The bytes that it takes for each logit besides: three float32 copies (the rows in the order of
their groups, those of all groups side by side, cut to what schemas allow), and what is allowed."""

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def bytes_per_token(text_config: Any, dtype: str) -> int:
    """Return the bytes that a token of a row takes in the KV cache: a key and a value of
    `head_dim` numbers for each key-value head of each layer. Sliding windows and compressed caches
    take less."""
    heads: int = text_config.num_attention_heads
    head_dim: int = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    key_value_heads: int = getattr(text_config, "num_key_value_heads", None) or heads
    numbers: int = 2 * text_config.num_hidden_layers * key_value_heads * head_dim
    return numbers * BYTES.get(dtype, 4)


def cpu_cache_bytes(config: EngineConfig, needed: int) -> int:
    """Return the size of the KV cache on a CPU: `engine.kv_cache_gib` if set, or else the bytes
    needed, at most a quarter of the memory but never below `DEFAULT_BYTES`."""
    if config.kv_cache_gib is not None:
        return int(config.kv_cache_gib * GIB)
    return max(DEFAULT_BYTES, min(needed, machine_memory() // CACHE_DIVISOR))


def choice_bytes(rows: int, vocabulary: int) -> int:
    """Return the most bytes of a GPU that the choice of tokens takes in a step of so many rows,
    next to the model and its logits."""
    return CHOICE_OF_LOGIT * rows * vocabulary + CHOICE


def gpu_memory(config: EngineConfig) -> int | None:
    """Return the bytes of a GPU's memory: of the one that `engine.gpu_memory_gib` describes, or of
    this machine's first; None without either."""
    if config.gpu_memory_gib is not None:
        return int(config.gpu_memory_gib * GIB)
    if not (may_have_gpu() and is_installed("torch")):  # a laptop that only plans
        return None
    if not torch.cuda.is_available():
        return None
    memory: int = torch.cuda.get_device_properties(0).total_memory
    return memory


def may_have_gpu() -> bool:
    """Return whether this machine has a driver of GPUs, which torch would need to see one. Unlike
    torch, this takes no seconds."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return os.path.exists("/dev/kfd")  # AMD
    return True


def gpu_cache_bytes(config: EngineConfig, text_config: Any) -> int | None:
    """Return the size of the KV cache on the GPUs of one copy of the model: what its weights leave
    and the choice of tokens leave of `engine.gpu_memory_utilization`. None without a GPU."""
    memory = gpu_memory(config)
    if memory is None:
        return None
    chosen = choice_bytes(config.max_num_seqs, text_config.vocab_size)
    left = (config.gpu_memory_utilization * memory - chosen) * config.gpus
    return max(0, int(left) - parameters(text_config) * BYTES.get(config.dtype, 4))


def parameters(text_config: Any) -> int:
    """Return the number of a model's parameters, by its configuration only."""
    require("counting the parameters of engine.model", "torch")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(text_config)
    # Tied ones count once.
    return sum({id(each): each.numel() for each in model.parameters()}.values())


def machine_memory() -> int:
    """Return the bytes of memory that this machine, or this process's container, has."""
    return int(min([psutil.virtual_memory().total, *_container_limits()]))


def _container_limits() -> Iterator[int]:
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroup v2 and v1
        try:
            text = (Path("/sys/fs/cgroup") / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            yield int(text)
