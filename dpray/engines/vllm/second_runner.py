"""Lockstep decoding in vLLM's second model runner ("V2"), which needs Triton.

The tokens and lengths of all requests are on the device, in slots that are used again. Scheduling
is asynchronous: when the engine sees the token of a step, the next step is under way. So the rows
of a text that is over are computed once more. Nothing is drawn in that step if the processor can
tell that the text is over, by an eos token or its length. A stop string is seen by the engine only.
Then one draw too many was made: the engine gives the text's length to
`LockstepWorker.lockstep_finish`, which throws the draw away, with all that it counted.

Claim: the texts and the state that the batch's next text begins with are those of the first runner,
to the last bit. What is thrown away leaves no trace: not in a text, the state, an error or a
record. So it costs nothing.
Proof: docs/privacy.md, section 2.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.sample.logits_processor import (
    LogitsContext,
    LogitsProcessor,
    LogitsProcRequestState,
)

from dpray.engines.base import EngineError
from dpray.engines.vllm.lockstep import LockstepProcessor, _Group


class SecondRunnerProcessor(LockstepProcessor, LogitsProcessor):
    """The logits processor of vLLM's second model runner."""

    draws_ahead = True

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        parallel = vllm_config.parallel_config
        if parallel.pipeline_parallel_size > 1 or parallel.enable_batch_sharded_sampling:
            raise ValueError(
                "engine.pipeline_parallel_size: lockstep decoding in vLLM's second model runner "
                "needs all layers and all rows on every rank; set VLLM_USE_V2_MODEL_RUNNER=0"
            )
        LockstepProcessor.__init__(self, req_states.device)
        self._state = req_states
        self._members: dict[int, tuple[str, int]] = {}
        """The group and number of the row in a slot."""
        self._slots = np.zeros(0, dtype=np.intp)
        """The slots of the batch's rows, in order."""
        self._lengths = self._slots
        self._input_ids = torch.empty(0)

    def attach(self, runner: Any) -> None:
        if getattr(runner, "kv_block_zeroer", None) is None:
            raise EngineError("this version of vLLM cannot clear blocks of its KV cache")

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        member = self._join(sampling_params, req_idx)
        self._members.pop(req_idx, None)
        if member is not None:
            self._members[req_idx] = member
        self._slots = self._slots[:0]  # the same slots may have other rows now
        return True  # also rows of no group draw readable tokens only

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        slots = ctx.idx_mapping_np
        if not np.array_equal(slots, self._slots):
            self._slots = slots.copy()
            members = ((i, self._members.get(slot)) for i, slot in enumerate(slots.tolist()))
            self._locate({i: member for i, member in members if member is not None})
        self._lengths = ctx.seq_lens_upper_bound_np[: len(slots)]  # exact without drafts
        self.unfinished_prefill = self._lengths < self._state.prefill_len.np[slots]
        self._input_ids = ctx.input_ids
        return self.force(logits)

    def same_history(self, group: _Group) -> bool:
        """Return whether every row has as many tokens as the selector drew. Which ones they are
        only the device knows (`_draw_tokens`)."""
        slots = self._slots[group.indices]
        written = self._lengths[group.indices] - self._state.prompt_len.np[slots]
        return bool((written == len(group.tokens)).all())

    def _draw_tokens(
        self, groups: list[_Group], logits: torch.Tensor, highest_N: torch.Tensor
    ) -> None:
        """Draw, and compare each row's last token on the device with what was drawn before: the
        answer comes to the host with what is drawn now, which is thrown away if they differ."""
        begun = [group for group in groups if group.tokens]
        rows = [index for group in begun for index in group.indices]
        told = [group.tokens[-1] for group in begun for _ in group.indices]
        same_R = self._input_ids[self._on_device(rows)] == self._on_device(told)
        same_R = same_R.to("cpu", non_blocking=True)
        drawn = [len(group.tokens) for group in begun]
        super()._draw_tokens(groups, logits, highest_N)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # the draw has waited for it
        by_group = same_R.split([len(group.indices) for group in begun])
        for group, count, same in zip(begun, drawn, by_group, strict=True):
            if not same.all():
                del group.tokens[count:]
                group.fate = "broken"

    def same_end(self, group: _Group) -> bool:
        if not group.tokens:
            return True
        slots = list(group.rows.values())
        last = self._state.prompt_len.np[slots] + len(group.tokens) - 1
        given = self._state.all_token_ids.gpu[self._on_device(slots), self._on_device(last)]
        return bool((given == group.tokens[-1]).all())

    def _on_device(self, values: Sequence[int] | np.ndarray) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.long, device=self.device)
