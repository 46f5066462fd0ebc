"""Lockstep decoding in vLLM's first model runner, the only one that its CPU build has.

A row's place in the batch is kept by the runner, and its output is a list on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from dpray.engines.base import EngineError
from dpray.engines.vllm.lockstep import LockstepProcessor, _Group


class FirstRunnerProcessor(LockstepProcessor, LogitsProcessor):
    """The logits processor of vLLM's first model runner."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        if vllm_config.scheduler_config.async_scheduling:
            raise ValueError("lockstep decoding needs async_scheduling=False")
        LockstepProcessor.__init__(self, device)
        self._members: dict[int, tuple[str, int]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def attach(self, runner: Any) -> None:
        on_cpu = self.device.type == "cpu"
        if not hasattr(runner, "_zero_block_ids" if on_cpu else "_kv_block_zeroer"):
            raise EngineError("this version of vLLM cannot clear blocks of its KV cache")
        if on_cpu:
            runner._zero_block_ids = partial(zero_blocks, runner.kv_caches)
        self.unfinished_prefill = runner.discard_request_mask.np  # the runner's own array

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        def join(
            params: SamplingParams, prompt: object, output: list[int]
        ) -> tuple[str, int] | None:
            return self._join(params, output)

        if process_dict_updates(self._members, batch_update, join):
            self._locate(self._members)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return self.force(logits)

    def same_history(self, group: _Group) -> bool:
        count, last = len(group.tokens), group.tokens[-1:]
        return all(len(o) == count and o[-1:] == last for o in group.rows.values())

    same_end = same_history


def zero_blocks(caches: Sequence[torch.Tensor], blocks: Sequence[int]) -> None:
    """Set blocks of the layers' caches to 0. vLLM's own function for CPUs leaves out layers with a
    sliding window."""
    for cache in caches:
        cache.index_fill_(0, torch.tensor(blocks, device=cache.device), 0)
