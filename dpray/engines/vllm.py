"""The vLLM engine has continuous batching, a prefix cache and tensor parallelism."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from dpray.engines.base import (
    Completion,
    Lockstep,
    LockstepGroup,
    OnCompletion,
    Prompts,
    Sampling,
    Samplings,
)
from dpray.engines.vllm_model import VllmModel
from dpray.engines.vllm_run import LockstepRun


class VllmEngine(VllmModel):
    """Is an `Engine` that generates and decodes in vLLM.

    `max_model_len` defaults to the model's context, 8192 at most. `max_num_seqs` rows run at a
    time; a larger group is decoded in parts. `max_num_batched_tokens` defaults to what a group of
    `max_num_seqs` rows needs when its prompts are in the prefix cache. On a CPU the KV cache
    defaults to what `group` needs: the rows of a typical group, and the tokens of each.

    `private_rows` says that groups of private prompts are decoded: kernels whose rows do not depend
    on each other are taken where vLLM has them (`VLLM_BATCH_INVARIANT`: NVIDIA GPUs of compute
    capability 8.0 or higher). `public_alone` says that a public row's logits decide which tokens
    may be drawn, or from which rows: they may not share a forward pass with private rows, and
    without such kernels a second copy of the model computes them.
    """

    def rows_at_once(self, tokens: int) -> int:
        return min(self.max_rows, self.blocks // self.blocks_of(tokens))

    def generate(
        self, prompts: Prompts, samplings: Samplings, on_completion: OnCompletion | None = None
    ) -> list[Completion]:
        encoded = self.encoded(prompts, samplings)
        params = {each: self._params(each) for each in set(samplings)}
        place = {f"generate-{next(self.serial)}": i for i in range(len(encoded))}
        completions: dict[int, Completion] = {}
        try:
            for request, i in place.items():
                self.add(request, encoded[i], params[samplings[i]])
            while len(completions) < len(encoded):
                for output in self.step():
                    i = place[output.request_id]
                    written = list(output.outputs[0].token_ids)
                    completions[i] = self.completion(encoded[i], written, samplings[i])
                    if on_completion is not None:
                        on_completion(i, completions[i])
        except BaseException:
            with contextlib.suppress(Exception):
                self.abort(place)
            raise
        return [completions[i] for i in range(len(encoded))]

    def _params(self, sampling: Sampling) -> Any:
        return self.sampling_params(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            stop=list(sampling.stop),
            stop_token_ids=list(self.eos_ids),
            output_kind=self.final_only,
        )

    def decode_lockstep(self, groups: Iterable[LockstepGroup]) -> Lockstep:
        return LockstepRun(self, iter(groups)).run()
